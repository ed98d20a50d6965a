"""LIGHTYEAR: merges the models that agree with ours on our own validation set.

    S_i = { θ_j ∈ N(i) | A(θ_i, θ_j; V_i) ≥ τ }
    θ_i ← θ_i + γ^t · (1/|S_i|) Σ_{j ∈ S_i} (θ_j − θ_i),   t = 0, 1, 2, …

The own model is part of the mean (A(θ_i, θ_i) = 1 ≥ τ, as in the paper's problem statement);
`include_self=False` is the sum over the neighbours alone.  An empty S_i leaves θ_i unchanged.

θ_i in A is our model after this round's training; with `reference="previous"` it is the one before,
our previous aggregate.  The pull starts from the trained model in either case: otherwise a site
with an empty S_i would lose its training.  `output` and `unbiased` are readings of A itself (see
`agreement`).

`guard=True` adds the checks of `guard` and ignores peers' BatchNorm statistics.  `guard=False` is
exactly the paper's method, except that models with non-finite weights get that as their reason.

A site that joins late, or restarts without its state, is far from all others, and γ^t has become
too small for merging to close the distance.  With the guard, a site for which every peer was too
far in two rounds in a row adopts the peer's model with the lowest loss on its own validation set,
if that is lower than its own by a wide margin, or at all and the model has clearly learned and most
peers are near it, as the sites of a working federation are near each other.  Any margin alone would
not do: where all peers are faulty and the validation set is small, one of their models has a
slightly lower loss by accident; but noisy models are far from each other, and flipped ones, which
are not, have learned nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from lightyear_node.errors import ConfigError, InvalidTask
from lightyear_node.learning.agreement import Reading
from lightyear_node.learning.batchnorm import is_statistic
from lightyear_node.learning.guard import (
    DistanceLimits,
    Farthest,
    decide,
    features_unformed,
    recordable,
    regret_max,
    soundness,
    tau_in_round,
)
from lightyear_node.learning.rules.base import (
    Averaging,
    Candidate,
    Judgement,
    MergeShare,
    RoundContext,
    fits,
    weighted_mean,
)
from lightyear_node.learning.validation import Validation
from lightyear_node.types import PeerName, Reason, Round, Verdict

ROUNDS_ALONE = "rounds_alone"
ROUNDS_BEHIND = 1
"""Earlier rounds without a merge before a peer's model is adopted: one may be an accident."""
CATCH_UP_MARGIN = 0.3
"""In units of ln C, or as measured: how much lower than guessing the loss of an adopted model must
be if other peers support it, and how much lower than ours without their support."""
WHOLE = 1.0
TENSOR_NAME_MAX = 120
"""Characters of a tensor's name in a verdict."""


@dataclass(frozen=True, slots=True)
class Lightyear(Averaging):
    tau: float = 0.6
    gamma: float = 0.95
    guard: bool = True
    include_self: bool = True
    weights: str = "uniform"
    """`uniform` as in the paper, or `samples`: by the training samples that sites claim."""
    weight_max: float = 0.5
    """Largest share of one peer, however many samples it claims; the rest is ours."""
    output: str = "logits"
    """The network function h: `logits`, or `softmax`, the class probabilities."""
    reference: str = "trained"
    """The model that peers agree with: ours as `trained`, or the `previous` aggregate."""
    unbiased: bool = False
    """Whether the agreement is the unbiased estimate, for small validation sets."""

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
        if self.output not in ("logits", "softmax"):
            raise ConfigError(
                f"rule lightyear: output is `logits` or `softmax`, not {self.output!r}"
            )
        if self.reference not in ("trained", "previous"):
            raise ConfigError(
                f"rule lightyear: reference is `trained` or `previous`, not {self.reference!r}"
            )

    @property
    def reading(self) -> Reading:
        return Reading(softmax=self.output == "softmax", unbiased=self.unbiased)

    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        validation: Validation,
        context: RoundContext,
    ) -> Judgement:
        validation.set_reference(
            own.weights,
            own_statistics=self.guard,
            previous=context.start if self.reference == "previous" else None,
            reading=self.reading,
        )
        if self.guard and validation.own_loss is None:
            raise InvalidTask("the guard needs labels in the validation set; or set guard: false")
        rounds_alone = context.state.get(ROUNDS_ALONE, 0)
        limits = None
        if self.guard:
            limits = DistanceLimits.of(
                own.weights, context.start, rounds_alone, context.zero_at_start
            )
        tau = self._tau(validation, context)
        verdicts = []
        for peer in peers:
            verdicts.append(self._judge_one(own, peer, validation, limits, tau))
            context.progress(len(verdicts), len(peers))
        adopted = None
        if self.guard and self.include_self and rounds_alone >= ROUNDS_BEHIND:
            adopted = _model_to_adopt(verdicts, peers, validation)
        if adopted is not None:
            taken = replace(
                adopted, accepted=True, reason=Reason.CAUGHT_UP, weight=WHOLE, details={}
            )
            others = (taken if verdict is adopted else verdict for verdict in verdicts)
            return Judgement(tuple(others), {ROUNDS_ALONE: 0})
        accepted = [peer for peer, v in zip(peers, verdicts, strict=True) if v.accepted]
        shares = self._shares(own, accepted)
        return Judgement(
            tuple(replace(v, weight=shares.get(v.peer, 0.0)) for v in verdicts),
            {ROUNDS_ALONE: 0 if accepted else rounds_alone + 1},
        )

    def _tau(self, validation: Validation, context: RoundContext) -> float:
        if not self.guard or validation.own_loss is None:
            return self.tau
        layers = (f"{layer.name}.weight" for layer in validation.final_layers)
        unformed = features_unformed(
            validation.own_loss,
            validation.chance,
            zero_final_layer=any(layer in context.zero_at_start for layer in layers),
        )
        lowest = -1.0 if self.unbiased else 0.0
        return tau_in_round(context.round, self.tau, unformed=unformed, lowest=lowest)

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
        self,
        own: Candidate,
        peer: Candidate,
        validation: Validation,
        limits: DistanceLimits | None,
        tau: float,
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
        farthest = limits.farthest(own.weights, peer.weights) if limits is not None else None
        if farthest is not None:
            checks["distance"] = recordable(farthest.distance)
            checks["distance_max"] = farthest.limit
        measured = validation.measure(peer.weights)
        if math.isnan(measured.agreement):  # finite weights, but their features overflow
            return verdict(Reason.NONFINITE, checks=checks)
        checks["agreement"] = measured.agreement
        checks["tau"] = tau
        own_loss = validation.own_loss
        if farthest is not None and measured.loss is not None and own_loss is not None:
            checks["regret"] = recordable(measured.loss - own_loss)
            checks["regret_max"] = regret_max(own_loss, validation.chance, beyond=farthest.beyond)
        found = verdict(decide(checks), measured.agreement, checks)
        return replace(found, details=_details(found.reason, farthest, validation))

    def merge(
        self, own: Mapping[str, Tensor], shares: Sequence[MergeShare], round: Round
    ) -> Iterator[tuple[str, Tensor]]:
        if self.guard:
            # A share of 1, although our model counts too, means that the peer's replaces ours.
            replaced = self.include_self and any(share.weight == WHOLE for share in shares)
            step = 1.0 if replaced else self.gamma**round
            return weighted_mean(own, shares, step=step, unchanged=is_statistic)
        return weighted_mean(own, shares, step=self.gamma**round)


def _details(reason: Reason, farthest: Farthest | None, validation: Validation) -> dict[str, str]:
    """Words that explain a rejection; the name of the tensor is from our own layout."""
    if reason is Reason.OK:
        return {}
    details = {"loss": "measured"} if validation.chance.measured else {}
    if reason is Reason.TOO_FAR and farthest is not None:
        details["tensor"] = farthest.name[:TENSOR_NAME_MAX]
    return details


def _model_to_adopt(
    verdicts: Sequence[Verdict], peers: Sequence[Candidate], validation: Validation
) -> Verdict | None:
    """If every valid model is too far from ours: the best, if it is much better or supported."""
    far = [verdict for verdict in verdicts if verdict.reason is Reason.TOO_FAR]
    sound = [verdict for verdict in verdicts if "distance" in verdict.checks]
    better = [verdict for verdict in far if verdict.checks.get("regret", 0.0) < 0]
    if len(far) < len(sound) or not better:
        return None
    best = min(better, key=lambda verdict: (verdict.checks["regret"], verdict.peer))
    weights = {peer.peer: peer.weights for peer in peers}
    others = [weights[verdict.peer] for verdict in sound if verdict is not best]
    chance, own_loss = validation.chance, validation.own_loss
    margin, regret = CATCH_UP_MARGIN * chance.unit, best.checks["regret"]
    learned = own_loss is not None and own_loss + regret <= chance.level - margin
    supported = learned and _is_supported(weights[best.peer], others)
    return best if supported or regret <= -margin else None


def _is_supported(model: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]) -> bool:
    """Whether this model and those near it are at least two, and more than half of all."""
    limits = DistanceLimits.of(model)
    near = [other for other in others if limits.farthest(model, other).share <= 1]
    return bool(near) and 2 * (1 + len(near)) > 1 + len(others)
