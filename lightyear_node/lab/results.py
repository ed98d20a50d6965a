"""What a demonstration found, as plain records: who learned how much, who judged whom and how.

Nothing here runs, draws or prints anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lightyear_node.records import PeerName


@dataclass(frozen=True, slots=True)
class SiteResult:
    """One site's accuracy, on its own test data, after the last round of three ways to learn."""

    name: PeerName
    malfunctioning: bool
    alone: float
    federated: float
    averaged: float
    """With everybody's model averaged in, unjudged, the malfunctioning sites' too."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one site decided about another's update of one round."""

    round: int
    judge: PeerName
    peer: PeerName
    accepted: bool
    reason: str
    score: float | None
    delivered: bool
    """False where there was nothing to judge: the update had not arrived, or was used before."""


@dataclass(frozen=True, slots=True)
class Results:
    federation: str
    rounds: int
    seed: int
    malfunction: str
    rule: str
    tau: float
    sites: Sequence[SiteResult]
    judgements: Sequence[Judgement]
    raw_bytes: int
    wire_bytes: int
    seconds: float
    report: Path
    """Where the page for people is."""

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
        """Over the verdicts of all sites on every other site's delivered updates.

        A malfunctioning site's own verdicts count too: only what it sends is corrupted, it judges
        as an honest one would.  An update that did not arrive was not judged and is not counted.
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

    def last_round(self) -> dict[tuple[PeerName, PeerName], Judgement]:
        """The last judgement of every (judge, peer) of something delivered."""
        return latest(self.judgements)

    def to_plain(self) -> dict[str, Any]:
        """What `demo --format json` gives."""
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


def latest(judgements: Iterable[Judgement]) -> dict[tuple[PeerName, PeerName], Judgement]:
    newest: dict[tuple[PeerName, PeerName], Judgement] = {}
    for one in judgements:
        pair = (one.judge, one.peer)
        if one.delivered and (pair not in newest or one.round >= newest[pair].round):
            newest[pair] = one
    return newest


def judgements_of(judge: PeerName, rounds: Iterable[Mapping[str, Any]]) -> list[Judgement]:
    """From a site's history as its node tells it."""
    return [
        Judgement(
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
