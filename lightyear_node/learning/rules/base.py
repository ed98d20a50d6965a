"""What every aggregation rule is: own model and peers' models → a verdict per peer → a new model.

Judging and merging are two steps, because the decision is made durable in between: `merge` needs
nothing but the weights that the verdicts gave.  What a rule must remember from one round to the
next (a reputation) it returns as plain values; they are journaled together with the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from lightyear_node.learning.probe import Probe
from lightyear_node.learning.weights import SchemaMismatch, layout_of, let_go
from lightyear_node.records import Digest, PeerName, Round, Verdict


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model that a site sent, or our own."""

    peer: PeerName
    weights: Mapping[str, Tensor]
    samples: int = 0
    """Training samples behind it; 0 where unknown."""
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """An accepted model and its share in the mean, as its verdict has it."""

    peer: PeerName
    weights: Mapping[str, Tensor]
    weight: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Where a judge stands: which round, of how many, and from where it came."""

    round: Round
    rounds: int | None = None
    """How many there will be; None where nobody knows."""
    start: Mapping[str, Tensor] | None = None
    """Our model before this round's training."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What the rule returned in the round before; empty at first."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """For rules that take long: called with the number of peers judged, and of all."""


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
        self, own: Candidate, peers: Sequence[Candidate], probe: Probe, turn: Turn
    ) -> Judgement: ...

    def merge(
        self, own: Mapping[str, Tensor], shares: Sequence[Share], round: Round
    ) -> Iterator[tuple[str, Tensor]]:
        """The new model, tensor by tensor in the order of a weights file."""
        ...


class Averaging:
    """What most rules share: the accepted models enter by their weights, training is plain.

    `proximal_strength` pulls training towards the round's start (FedProx's μ).  A positive
    `personal_strength` (Ditto's λ) gives the site a second, personal model, which is trained with
    that pull towards the shared one, stays at home, and is the one that is evaluated and used.
    With `own_statistics`, BatchNorm's are estimated anew on our own inputs after every merge.
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
        self, own: Mapping[str, Tensor], shares: Sequence[Share], round: Round
    ) -> Iterator[tuple[str, Tensor]]:
        return mixed(own, shares)


def shares_of(verdicts: Sequence[Verdict], peers: Sequence[Candidate]) -> list[Share]:
    """The accepted ones among the peers that were judged."""
    weights = {peer.peer: peer.weights for peer in peers}
    return [Share(v.peer, weights[v.peer], v.weight) for v in verdicts if v.accepted]


def fits(own: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """Whether names, shapes and types are ours; for a weights file the header has settled it."""
    try:
        layout_of(own).check(theirs)
    except SchemaMismatch:
        return False
    return True


def mixed(
    own: Mapping[str, Tensor],
    shares: Sequence[Share],
    *,
    pull: float = 1.0,
    stays: Callable[[str], bool] = lambda name: False,
) -> Iterator[tuple[str, Tensor]]:
    """θ_i + pull · Σ_j w_j (θ_j − θ_i): the mean, our model having what the shares leave of it.

    Peers are added in the order of their names, in single precision or better, so every order of
    arrival gives the same bits.  With no shares, and for names that stay, θ_i comes back as it is.
    """
    total = sum(share.weight for share in shares)
    if total > 1 + 1e-9:
        raise ValueError(f"the peers' shares add up to {total}")
    ordered = sorted(shares, key=lambda share: share.peer)
    for name in layout_of(own).entries:
        mine = own[name]
        if not ordered or stays(name):
            yield name, mine
        else:
            yield name, _mixed_tensor(name, mine, ordered, pull)
        let_go(own, name)


def _mixed_tensor(name: str, mine: Tensor, shares: Sequence[Share], pull: float) -> Tensor:
    wide = mine.to(torch.promote_types(mine.dtype, torch.float32))
    merged = wide.clone()
    for share in shares:
        theirs = share.weights[name].to(wide.device, wide.dtype)
        merged += (pull * share.weight) * (theirs - wide)
        let_go(share.weights, name)
    return merged.to(mine.dtype)
