"""Measures the merged model before it is kept, and leaves out peers that make it worse.

Peers are judged one by one; models that pass alone may still harm ours together.  The loss of the
merged model on V_i is therefore limited:

    L(merged) ≤ L_i + h u,   in the first round L(merged) ≤ max(L_i + h u, c)

with the loss of guessing c and the unit u of `chance`: both are ln C for class labels and measured
for other losses, where u is replaced by L_i − c while that is larger.  The loss is not the
decision: colluders can lower the one and spoil the other.  So after the first round the decisions
of the merged model (`decisions`), compared with ours sample by sample, must not be worse by more
than a standard error.  Otherwise the worst peer is left out and its share of the mean becomes ours,
until both conditions are met or no peer is left.

The limit is not a share of our advantage, c − L_i: merging honest models costs most while that
is small, and sites that then leave each other out diverge for good.  For the same reason the loss
of guessing is accepted in the first round: the mean of models that have just left a common start is
often much worse than each of them on its own data, and yet the best start for the next rounds.

The worst peer is the one whose model, merged with ours alone at its weight, gives the largest loss,
or first of all those with which our decisions are worse.
This measures its effect on *our* model: a model with a good loss that cannot be averaged with ours
gains nothing, and other peers cannot make an honest one look bad.  It takes at most two forward
passes per peer; leaving out each of them in turn would take the square of that.

Pure: the caller makes and measures the merges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from lightyear_node.learning.chance import Chance
from lightyear_node.learning.guard import recordable
from lightyear_node.types import Attempt, Harm, PeerName

DECISIONS_MARGIN = 1.0
"""Standard errors by which the decisions of a merged model may be worse than ours."""


def loss_limit(round: int, own_loss: float, chance: Chance, allowed: float) -> float:
    """Largest loss of a merged model that is kept."""
    if not math.isfinite(own_loss):
        return recordable(own_loss)  # any finite loss is no worse
    limit = own_loss + allowed * max(chance.unit, chance.shortfall(own_loss))
    return max(limit, chance.level) if round == 0 else limit


@dataclass(frozen=True, slots=True)
class Measured:
    """A merged model on our validation data."""

    loss: float
    gain: float | None = None
    """Mean change of our decisions' scores; None if they are not compared."""
    error: float | None = None
    """Standard error of the gain."""

    def is_allowed(self, limit: float) -> bool:
        return math.isfinite(self.loss) and self.loss <= limit and not self.decides_worse

    @property
    def decides_worse(self) -> bool:
        if self.gain is None or self.error is None:
            return False
        return self.gain < -DECISIONS_MARGIN * self.error


def choose_dropped(
    peers: Sequence[PeerName],
    measure_without: Callable[[Collection[PeerName]], Measured],
    *,
    own_loss: float,
    limit: float,
) -> Harm:
    """Choose the peers to leave out of the merge, independent of the order of `peers`.

    `measure_without` merges all peers but the given ones, and measures the result.
    """
    found: dict[frozenset[PeerName], Measured] = {}

    def measured(without: Collection[PeerName]) -> Measured:
        key = frozenset(without)
        if key not in found:
            found[key] = measure_without(key)
        return found[key]

    def result(dropped: Sequence[PeerName], *, kept_local: bool = False) -> Harm:
        attempts = [
            Attempt(tuple(sorted(key)), recordable(one.loss), one.gain, one.error)
            for key, one in found.items()
        ]
        return Harm(limit, recordable(own_loss), tuple(attempts), tuple(dropped), kept_local)

    def badness(peer: PeerName) -> tuple[bool, float]:
        alone = measured(all_peers - {peer})
        return not alone.is_allowed(limit), recordable(alone.loss)

    if measured(()).is_allowed(limit):
        return result(())
    all_peers = frozenset(peers)
    # The sort is stable, also in reverse: by name where peers are equally bad.
    worst_first = sorted(sorted(all_peers), key=badness, reverse=True)
    for count in range(1, len(worst_first)):
        if measured(worst_first[:count]).is_allowed(limit):
            return result(worst_first[:count])
    return result(worst_first, kept_local=True)
