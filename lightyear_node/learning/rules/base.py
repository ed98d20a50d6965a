"""The interface of aggregation rules: own and peers' models → a verdict per peer → a new model.

Judging and merging are two steps, because the decision is made durable in between: `merge` needs
only the weights in the verdicts.  A rule returns its state for the next round (a reputation) as
JSON values, which are journaled together with the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightyear_node.learning.validation import Validation
from lightyear_node.learning.weights import SchemaMismatch, layout_of, release
from lightyear_node.types import Digest, PeerName, Round, Verdict


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that a site sent, or our own."""

    peer: PeerName
    weights: Mapping[str, Tensor]
    samples: int = 0
    """Number of training samples; 0 if unknown."""
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class MergeShare:
    """An accepted model and its share in the mean, from its verdict."""

    peer: PeerName
    weights: Mapping[str, Tensor]
    weight: float


@dataclass(frozen=True, slots=True)
class RoundContext:
    """The round in which a rule judges."""

    round: Round
    rounds: int | None = None
    """Total number of rounds; None if unknown."""
    start: Mapping[str, Tensor] | None = None
    """Our model before this round's training."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """The state that the rule returned in the round before; empty at first."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """Called with the number of peers judged and their total, by rules that take long."""
    zero_at_start: Collection[str] = ()
    """Tensors that are zero in the common start, and so have no scale at first."""


@dataclass(frozen=True, slots=True)
class Judgement:
    verdicts: tuple[Verdict, ...]
    """One for each peer, in the order given."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""


class Rule(Protocol):
    """A frozen dataclass; its fields are the options that peers.yaml may set."""

    @property
    def proximal_strength(self) -> float: ...

    @property
    def personal_strength(self) -> float: ...

    @property
    def own_statistics(self) -> bool: ...

    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        validation: Validation,
        context: RoundContext,
    ) -> Judgement: ...

    def merge(
        self, own: Mapping[str, Tensor], shares: Sequence[MergeShare], round: Round
    ) -> Iterator[tuple[str, Tensor]]:
        """The new model, tensor by tensor in the order of a weights file."""
        ...


class Averaging:
    """Base of most rules: accepted models enter the mean by their weights; training is plain.

    `proximal_strength` is the strength of the proximal term in training (FedProx's μ).  A positive
    `personal_strength` (Ditto's λ) gives the site a second, personal model, trained with such a
    term towards the shared one.  It is not exchanged; it is the one that is evaluated and used.
    With `own_statistics`, BatchNorm's are estimated from our own inputs after every merge.
    """

    __slots__ = ()

    @property
    def proximal_strength(self) -> float:
        return 0.0

    @property
    def personal_strength(self) -> float:
        return 0.0

    @property
    def own_statistics(self) -> bool:
        return False

    def merge(
        self, own: Mapping[str, Tensor], shares: Sequence[MergeShare], round: Round
    ) -> Iterator[tuple[str, Tensor]]:
        return weighted_mean(own, shares)


def shares_of(verdicts: Sequence[Verdict], peers: Sequence[Candidate]) -> list[MergeShare]:
    """The shares of the accepted peers."""
    weights = {peer.peer: peer.weights for peer in peers}
    return [MergeShare(v.peer, weights[v.peer], v.weight) for v in verdicts if v.accepted]


def fits(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether names, shapes and types are ours; a weights file was checked by its header."""
    try:
        layout_of(own).check(theirs)
    except SchemaMismatch:
        return False
    return True


def weighted_mean(
    own: Mapping[str, Tensor],
    shares: Sequence[MergeShare],
    *,
    step: float = 1.0,
    unchanged: Callable[[str], bool] = lambda name: False,
) -> Iterator[tuple[str, Tensor]]:
    """θ_i + s · Σ_j w_j (θ_j − θ_i), s = `step`: a mean in which our weight is 1 − Σ_j w_j.

    Peers are added in the order of their names, in single precision or better, so that the result
    does not depend on the order of arrival.  Without shares, and for names for which `unchanged` is
    true, θ_i is returned unchanged.
    """
    total = sum(share.weight for share in shares)
    if total > 1 + 1e-9:
        raise ValueError(f"the peers' shares add up to {total}")
    ordered = sorted(shares, key=lambda share: share.peer)
    for name in layout_of(own).entries:
        mine = own[name]
        if not ordered or unchanged(name):
            yield name, mine
        else:
            yield name, _mean_of_tensor(name, mine, ordered, step)
        release(own, name)


def _mean_of_tensor(name: str, mine: Tensor, shares: Sequence[MergeShare], step: float) -> Tensor:
    wide = mine.to(torch.promote_types(mine.dtype, torch.float32))
    merged = wide.clone()
    for share in shares:
        theirs = share.weights[name].to(wide.device, wide.dtype)
        merged += (step * share.weight) * (theirs - wide)
        release(share.weights, name)
    return merged.to(mine.dtype)
