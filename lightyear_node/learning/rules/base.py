"""What every aggregation rule is: own model and peers' models → a verdict per peer → a new model.

Judging and merging are two steps, because the decision is made durable in between: `merge` needs
nothing but the weights that the verdicts gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

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


class Rule(Protocol):
    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        probe: Probe,
        round: Round,
        *,
        start: Mapping[str, Tensor] | None = None,
    ) -> list[Verdict]:
        """A verdict for each peer, in the order given.  `start` is our model before training."""
        ...

    def merge(
        self, own: Mapping[str, Tensor], shares: Sequence[Share], round: Round
    ) -> Iterator[tuple[str, Tensor]]:
        """The new model, tensor by tensor in the order of a weights file."""
        ...


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
