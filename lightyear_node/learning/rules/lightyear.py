"""LIGHTYEAR: take what agrees with the own model on the own validation set.

    S_i = { θ_j ∈ N(i) | A(θ_i, θ_j; V_i) ≥ τ }
    θ_i ← θ_i + γ^t · (1/|S_i|) Σ_{j ∈ S_i} (θ_j − θ_i),   t = 0, 1, 2, …

The own model belongs to the mean (A(θ_i, θ_i) = 1 ≥ τ, and the paper's problem statement has it);
`include_self=False` is the sum over the neighbours alone.  An empty S_i leaves θ_i as it is.

`guard=True` adds the checks of `guard`, and leaves peers' BatchNorm statistics out of everything.
`guard=False` is the paper's method exactly, save that weights that are not numbers are named so.

A site that joins late, or begins again without its memory, is far from all others and they from it;
γ^t has become small, and so merging would never bring it back.  With the guard, a site for which
everybody was too far for two rounds in a row takes over, as it is, the peers' model that does best
on its own validation set, if that does better there than its own.
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
    first_tau,
    recordable,
    regret_max,
    soundness,
)
from lightyear_node.learning.probe import Probe
from lightyear_node.learning.rules.base import (
    Averaging,
    Candidate,
    Judgement,
    Share,
    Turn,
    fits,
    mixed,
)
from lightyear_node.learning.statistics import is_statistic
from lightyear_node.records import PeerName, Reason, Round, Verdict

ROUNDS_ALONE = "rounds_alone"
ROUNDS_BEHIND = 1
"""Rounds before this one that must have passed alone: one may be an accident."""
WHOLE = 1.0


@dataclass(frozen=True, slots=True)
class Lightyear(Averaging):
    tau: float = 0.6
    gamma: float = 0.95
    guard: bool = True
    include_self: bool = True
    weights: str = "uniform"
    """`uniform` as in the paper, or `samples`: by the training samples that sites say they have."""
    weight_max: float = 0.5
    """No peer gets more of the mean, however many samples it claims; the rest is ours."""

    def __post_init__(self) -> None:
        if not 0 <= self.tau <= 1:
            raise ConfigError(f"rule lightyear: tau is {self.tau}, not between 0 and 1")
        if not 0 < self.gamma <= 1:
            raise ConfigError(f"rule lightyear: gamma is {self.gamma}, not above 0 and at most 1")
        if self.weights not in ("uniform", "samples"):
            raise ConfigError(
                f"rule lightyear: weights are `uniform` or `samples`, not {self.weights!r}"
            )
        if not 0 < self.weight_max <= 1:
            raise ConfigError(f"rule lightyear: weight_max is {self.weight_max}, not in (0, 1]")

    def judge(
        self, own: Candidate, peers: Sequence[Candidate], probe: Probe, turn: Turn
    ) -> Judgement:
        probe.anchor(own.weights, own_statistics=self.guard)
        if self.guard and probe.own_loss is None:
            raise ValueError("the guard needs labels in the validation set; or set guard: false")
        rounds_alone = turn.state.get(ROUNDS_ALONE, 0)
        ruler = Ruler.of(own.weights, turn.start, rounds_alone) if self.guard else None
        tau = first_tau(turn.round, self.tau) if self.guard else self.tau
        verdicts = []
        for peer in peers:
            verdicts.append(self._judge_one(own, peer, probe, ruler, tau))
            turn.progress(len(verdicts), len(peers))
        ahead = _far_ahead(verdicts) if self.guard and self.include_self else None
        if ahead is not None and rounds_alone >= ROUNDS_BEHIND:
            taken = replace(ahead, accepted=True, reason=Reason.CAUGHT_UP, weight=WHOLE)
            others = (taken if verdict is ahead else verdict for verdict in verdicts)
            return Judgement(tuple(others), {ROUNDS_ALONE: 0})
        accepted = [peer for peer, v in zip(peers, verdicts, strict=True) if v.accepted]
        shares = self._shares(own, accepted)
        return Judgement(
            tuple(replace(v, weight=shares.get(v.peer, 0.0)) for v in verdicts),
            {ROUNDS_ALONE: 0 if accepted else rounds_alone + 1},
        )

    @property
    def own_statistics(self) -> bool:
        return self.guard

    def _shares(self, own: Candidate, accepted: Sequence[Candidate]) -> dict[PeerName, float]:
        counted = [*accepted, own] if self.include_self else accepted
        if self.weights == "uniform" or not all(site.samples > 0 for site in counted):
            return {peer.peer: 1 / len(counted) for peer in accepted}
        total = sum(site.samples for site in counted)
        return {peer.peer: min(peer.samples / total, self.weight_max) for peer in accepted}

    def _judge_one(
        self, own: Candidate, peer: Candidate, probe: Probe, ruler: Ruler | None, tau: float
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
            distance, limit = ruler.farthest(own.weights, peer.weights)
            checks["distance"], checks["distance_max"] = recordable(distance), limit
        measured = probe.measure(peer.weights)
        if math.isnan(measured.agreement):  # finite weights, but their features overflow
            return verdict(Reason.NONFINITE, checks=checks)
        checks["agreement"] = measured.agreement
        checks["tau"] = tau
        if ruler is not None and measured.loss is not None and probe.own_loss is not None:
            checks["regret"] = recordable(measured.loss - probe.own_loss)
            checks["regret_max"] = regret_max(probe.own_loss, probe.chance_loss)
        return verdict(decide(checks), measured.agreement, checks)

    def merge(
        self, own: Mapping[str, Tensor], shares: Sequence[Share], round: Round
    ) -> Iterator[tuple[str, Tensor]]:
        if self.guard:
            # Whoever has the whole, though we count too, is not merged with ours but replaces it.
            replaced = self.include_self and any(share.weight == WHOLE for share in shares)
            pull = 1.0 if replaced else self.gamma**round
            return mixed(own, shares, pull=pull, stays=is_statistic)
        return mixed(own, shares, pull=self.gamma**round)


def _far_ahead(verdicts: Sequence[Verdict]) -> Verdict | None:
    """If every sound model is too far from ours: the best of those that do better than ours."""
    far = [verdict for verdict in verdicts if verdict.reason is Reason.TOO_FAR]
    sound = [verdict for verdict in verdicts if "distance" in verdict.checks]
    better = [verdict for verdict in far if verdict.checks.get("regret", 0.0) < 0]
    if len(far) < len(sound) or not better:
        return None
    return min(better, key=lambda verdict: (verdict.checks["regret"], verdict.peer))
