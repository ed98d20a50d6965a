"""LIGHTYEAR: take what agrees with the own model on the own validation set.

    S_i = { θ_j ∈ N(i) | A(θ_i, θ_j; V_i) ≥ τ }
    θ_i ← θ_i + γ^t · (1/|S_i|) Σ_{j ∈ S_i} (θ_j − θ_i),   t = 0, 1, 2, …

The own model belongs to the mean (A(θ_i, θ_i) = 1 ≥ τ, and the paper's problem statement has it);
`include_self=False` is the sum over the neighbours alone.  An empty S_i leaves θ_i as it is.

`guard=True` adds the checks of `guard`, and keeps BatchNorm's running statistics at home.
`guard=False` is the paper's method exactly, save that weights that are not numbers are named so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightyear_node.errors import ConfigError
from lightyear_node.learning.guard import (
    Ruler,
    decide,
    is_statistic,
    recordable,
    regret_max,
    soundness,
)
from lightyear_node.learning.probe import Probe
from lightyear_node.learning.rules.base import Candidate, Share, fits, mixed
from lightyear_node.records import Reason, Round, Verdict


@dataclass(frozen=True, slots=True)
class Lightyear:
    tau: float = 0.6
    gamma: float = 0.95
    guard: bool = True
    include_self: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1:
            raise ConfigError(f"rule lightyear: tau is {self.tau}, not between 0 and 1")
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"rule lightyear: gamma is {self.gamma}, not above 0 and at most 1")

    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        probe: Probe,
        round: Round,
        *,
        start: Mapping[str, Tensor] | None = None,
    ) -> list[Verdict]:
        probe.anchor(own.weights)
        if self.guard and probe.own_loss is None:
            raise ValueError("the guard needs labels in the validation set; or set guard: false")
        ruler = Ruler.of(own.weights, start) if self.guard else None
        verdicts = [self._judge_one(own, peer, probe, ruler) for peer in peers]
        accepted = sum(verdict.accepted for verdict in verdicts)
        share = 1 / (accepted + self.include_self) if accepted else 0.0
        return [replace(v, weight=share) if v.accepted else v for v in verdicts]

    def _judge_one(
        self, own: Candidate, peer: Candidate, probe: Probe, ruler: Ruler | None
    ) -> Verdict:
        def verdict(
            reason: Reason, score: float | None = None, checks: Mapping[str, float] | None = None
        ) -> Verdict:
            accepted = reason is Reason.OK
            return Verdict(peer.peer, accepted, reason, score, 0.0, checks or {}, peer.digest)

        if not fits(own.weights, peer.weights):
            return verdict(Reason.SCHEMA_MISMATCH)
        sound = soundness(peer.weights)
        if sound is not Reason.OK:
            return verdict(sound)
        checks: dict[str, float] = {}
        if ruler is not None:
            checks["distance"] = recordable(ruler.distance(own.weights, peer.weights))
            checks["distance_max"] = ruler.distance_max
        measured = probe.measure(peer.weights)
        if math.isnan(measured.agreement):  # finite weights, but their features overflow
            return verdict(Reason.NONFINITE, checks=checks)
        checks["agreement"] = measured.agreement
        checks["tau"] = self.tau
        if ruler is not None and measured.loss is not None and probe.own_loss is not None:
            checks["regret"] = recordable(measured.loss - probe.own_loss)
            checks["regret_max"] = regret_max(probe.own_loss, probe.chance_loss)
        return verdict(decide(checks), measured.agreement, checks)

    def merge(
        self, own: Mapping[str, Tensor], shares: Sequence[Share], round: Round
    ) -> Iterator[tuple[str, Tensor]]:
        if self.guard:
            return mixed(own, shares, pull=self.gamma**round, stays=is_statistic)
        return mixed(own, shares, pull=self.gamma**round)
