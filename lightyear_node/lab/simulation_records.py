"""A federation to simulate, and the results: records that cross process borders as JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.partition import PartitionConfig
from lightyear_node.types import Harm, PeerName, Round, Served, Verdict, Worth
from lightyear_node.worker.job_types import verdict_from_plain, verdict_to_plain


@dataclass(frozen=True, slots=True)
class SimulationSpec:
    """A federation to simulate.  A site's data follows from its place in the sorted `sites`."""

    sites: Sequence[PeerName]
    rounds: int
    seed: int
    rule: RuleConfig
    task: TaskConfig = field(default_factory=TaskConfig)
    malfunctions: Mapping[PeerName, MalfunctionConfig] = field(default_factory=dict)
    final_only: bool = False
    """Measure after the last round only, which saves time on tasks with much test data."""
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    """Which tensors the sites would send, and in which element type."""
    partition: PartitionConfig | None = None
    """A new partition of the task's data; None leaves it as the task has it."""
    participation: float = 1.0
    """Probability with which a site takes part in a round."""

    def to_plain(self) -> dict[str, Any]:
        return {
            "sites": list(self.sites),
            "rounds": self.rounds,
            "seed": self.seed,
            "rule": self.rule.model_dump(mode="json"),
            "task": self.task.model_dump(mode="json"),
            "malfunctions": {
                name: malfunction.model_dump(mode="json")
                for name, malfunction in self.malfunctions.items()
            },
            "final_only": self.final_only,
            "exchange": self.exchange.model_dump(mode="json"),
            "partition": self.partition.model_dump(mode="json") if self.partition else None,
            "participation": self.participation,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        return cls(
            sites=[PeerName(name) for name in plain["sites"]],
            rounds=plain["rounds"],
            seed=plain["seed"],
            rule=RuleConfig.model_validate(plain["rule"]),
            task=TaskConfig.model_validate(plain["task"]),
            malfunctions={
                PeerName(name): MalfunctionConfig.model_validate(value)
                for name, value in plain["malfunctions"].items()
            },
            final_only=plain["final_only"],
            exchange=ExchangeConfig.model_validate(plain["exchange"]),
            partition=PartitionConfig.model_validate(plain["partition"])
            if plain["partition"]
            else None,
            participation=plain["participation"],
        )

    def takes_part(self, site: PeerName, round: Round) -> bool:
        """Whether a site takes part in a round; drawn from the seed, equal in every run."""
        digest = hashlib.sha256(f"participation/{self.seed}/{site}/{round}".encode()).digest()
        return int.from_bytes(digest[:8], "big") < self.participation * 2**64


@dataclass(frozen=True, slots=True)
class SimulatedRound:
    """One round at one site: its metrics after training and after merging, and its verdicts.

    `harm` is the result of the merge check, for rules that have one.  A site that does not take
    part keeps its model, whose metrics then stand for both.
    """

    round: Round
    local: Mapping[str, float]
    merged: Mapping[str, float]
    verdicts: Sequence[Verdict]
    harm: Harm | None = None
    takes_part: bool = True
    worth: Worth | None = None
    """Comparison with the model that never merges, for rules with a shadow."""

    @property
    def alone(self) -> Mapping[str, float]:
        """Metrics of the model that never merges."""
        return self.worth.alone if self.worth is not None else {}

    @property
    def served(self) -> Mapping[str, float]:
        """Metrics of the model that the site uses: the merged one, unless a shadow is better."""
        if self.worth is not None and self.worth.served is Served.ALONE:
            return self.alone
        return self.merged

    def metrics(self) -> dict[str, float]:
        """All metrics by name: `local.*` after training, `merged.*` after merging.

        With a shadow also `alone.*` and `served.*`.
        """
        found = {"local": self.local, "merged": self.merged}
        if self.worth is not None:
            found |= {"alone": self.alone, "served": self.served}
        return {
            f"{kind}.{name}": value
            for kind, metrics in found.items()
            for name, value in metrics.items()
        }

    def to_plain(self) -> dict[str, Any]:
        return {
            "round": self.round,
            "local": dict(self.local),
            "merged": dict(self.merged),
            "verdicts": [verdict_to_plain(verdict) for verdict in self.verdicts],
            "harm": asdict(self.harm) if self.harm is not None else None,
            "takes_part": self.takes_part,
            "worth": self.worth.to_plain() if self.worth is not None else None,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        verdicts = tuple(verdict_from_plain(verdict) for verdict in plain["verdicts"])
        harm = Harm.from_plain(plain["harm"]) if plain["harm"] else None
        return cls(
            round=Round(plain["round"]),
            local=plain["local"],
            merged=plain["merged"],
            verdicts=verdicts,
            harm=harm,
            takes_part=plain["takes_part"],
            worth=Worth.from_plain(plain["worth"]) if plain["worth"] else None,
        )


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Every site's rounds, in order."""

    sites: Mapping[PeerName, Sequence[SimulatedRound]]
    update_bytes: int = 0
    """Size of the update that one site sends to one other."""
    trainings: int = 0
    """Rounds of training of all sites together."""
    cached: int = 0
    """How many of these were taken from the cache."""

    def final(self, metric: str) -> dict[PeerName, float]:
        return {name: rounds[-1].served[metric] for name, rounds in self.sites.items()}

    def to_plain(self) -> dict[str, Any]:
        sites = {name: [one.to_plain() for one in rounds] for name, rounds in self.sites.items()}
        return {
            "sites": sites,
            "update_bytes": self.update_bytes,
            "trainings": self.trainings,
            "cached": self.cached,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        sites = {
            PeerName(name): [SimulatedRound.of(one) for one in rounds]
            for name, rounds in plain["sites"].items()
        }
        return cls(sites, plain["update_bytes"], plain["trainings"], plain["cached"])
