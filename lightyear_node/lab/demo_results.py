"""The results of a demo as records: each site's accuracy, and all verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lightyear_node.types import PeerName


@dataclass(frozen=True, slots=True)
class SiteResult:
    """One site's accuracy on its own test data after the last round, in three settings."""

    name: PeerName
    malfunctioning: bool
    alone: float
    federated: float
    averaged: float
    """With all models averaged without judging, those of malfunctioning sites too."""


@dataclass(frozen=True, slots=True)
class PeerJudgement:
    """What one site decided about another's update of one round."""

    round: int
    judge: PeerName
    peer: PeerName
    accepted: bool
    reason: str
    score: float | None
    delivered: bool
    """False if there was nothing to judge: the update had not arrived, or was a repetition."""


@dataclass(frozen=True, slots=True)
class DemoResults:
    federation: str
    rounds: int
    seed: int
    malfunction: str
    rule: str
    tau: float
    sites: Sequence[SiteResult]
    judgements: Sequence[PeerJudgement]
    raw_bytes: int
    wire_bytes: int
    seconds: float
    report: Path
    """The path of the page."""

    @property
    def bad(self) -> frozenset[PeerName]:
        return frozenset(site.name for site in self.sites if site.malfunctioning)

    @property
    def honest(self) -> list[SiteResult]:
        return [site for site in self.sites if not site.malfunctioning]

    @property
    def everyone_averaged(self) -> float:
        return fmean(site.averaged for site in self.honest)

    @property
    def honest_alone(self) -> float:
        return fmean(site.alone for site in self.honest)

    @property
    def honest_federated(self) -> float:
        return fmean(site.federated for site in self.honest)

    def verdict_counts(self) -> dict[str, int]:
        """Count the verdicts of all sites on the delivered updates of others.

        The verdicts of malfunctioning sites count, too: only their updates are corrupted.  An
        update that did not arrive is not counted.
        """
        counted = Counter(
            ("malfunctioning" if one.peer in self.bad else "honest")
            + ("_accepted" if one.accepted else "_rejected")
            for one in self.judgements
            if one.delivered
        )
        return {
            key: counted[key]
            for key in (
                "honest_accepted",
                "honest_rejected",
                "malfunctioning_accepted",
                "malfunctioning_rejected",
            )
        }

    def last_round(self) -> dict[tuple[PeerName, PeerName], PeerJudgement]:
        """The last judgement of a delivered update, by (judge, peer)."""
        return latest(self.judgements)

    def to_plain(self) -> dict[str, Any]:
        """The data of `demo --format json`."""
        return {
            "federation": self.federation,
            "rounds": self.rounds,
            "sites": [
                {
                    "name": site.name,
                    "malfunctioning": site.malfunctioning,
                    "metric_alone": site.alone,
                    "metric_federated": site.federated,
                }
                for site in self.sites
            ],
            "everyone_averaged": self.everyone_averaged,
            "verdicts": self.verdict_counts(),
            "bytes": {"raw": self.raw_bytes, "wire": self.wire_bytes},
            "report": str(self.report),
        }


def latest(judgements: Iterable[PeerJudgement]) -> dict[tuple[PeerName, PeerName], PeerJudgement]:
    newest: dict[tuple[PeerName, PeerName], PeerJudgement] = {}
    for one in judgements:
        pair = (one.judge, one.peer)
        if one.delivered and (pair not in newest or one.round >= newest[pair].round):
            newest[pair] = one
    return newest


def judgements_of(judge: PeerName, rounds: Iterable[Mapping[str, Any]]) -> list[PeerJudgement]:
    """The judgements in the history that a node returns."""
    return [
        PeerJudgement(
            round=entry["round"],
            judge=judge,
            peer=PeerName(verdict["peer"]),
            accepted=verdict["accepted"],
            reason=verdict["reason"],
            score=verdict.get("score"),
            delivered=verdict.get("digest") is not None,
        )
        for entry in rounds
        for verdict in entry["verdicts"]
    ]
