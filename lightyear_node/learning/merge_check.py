"""Measures the merged model before it is kept, and leaves out peers that make it worse.

Peers are judged one by one; models that pass alone may still harm ours together.  The loss of the
merged model on V_i is therefore limited:

    L(merged) ≤ L_i + h u,   in the first round L(merged) ≤ max(L_i + h u, c)

with the loss of guessing c and the unit u of `chance`: both are ln C for class labels and measured
for other losses, where u is replaced by L_i − c while that is larger.  Otherwise the worst peer is
left out and its share of the mean becomes ours, until the limit is met or no peer is left.

The limit is not a share of our advantage, c − L_i: merging honest models costs most while that
is small, and sites that then leave each other out diverge for good.  For the same reason the loss
of guessing is accepted in the first round: the mean of models that have just left a common start is
often much worse than each of them on its own data, and yet the best start for the next rounds.

The worst peer is the one whose model, merged with ours alone at its weight, gives the largest loss.
This measures its effect on *our* model: a model with a good loss that cannot be averaged with ours
gains nothing, and other peers cannot make an honest one look bad.  It takes at most two forward
passes per peer; leaving out each of them in turn would take the square of that.

Pure: the caller makes and measures the merges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from lightyear_node.learning.chance import Chance
from lightyear_node.learning.guard import recordable
from lightyear_node.types import Attempt, Harm, PeerName


def loss_limit(round: int, own_loss: float, chance: Chance, allowed: float) -> float:
    """Largest loss of a merged model that is kept."""
    if not math.isfinite(own_loss):
        return recordable(own_loss)  # any finite loss is no worse
    limit = own_loss + allowed * max(chance.unit, chance.shortfall(own_loss))
    return max(limit, chance.level) if round == 0 else limit


def choose_dropped(
    peers: Sequence[PeerName],
    loss_without: Callable[[Collection[PeerName]], float],
    *,
    own_loss: float,
    limit: float,
) -> Harm:
    """Choose the peers to leave out of the merge, independent of the order of `peers`.

    `loss_without` merges all peers but the given ones, and returns the loss.
    """
    losses: dict[frozenset[PeerName], float] = {}

    def loss(without: Collection[PeerName]) -> float:
        key = frozenset(without)
        if key not in losses:
            losses[key] = loss_without(key)
        return losses[key]

    def within_limit(without: Collection[PeerName]) -> bool:
        return math.isfinite(loss(without)) and loss(without) <= limit

    def result(dropped: Sequence[PeerName], *, kept_local: bool = False) -> Harm:
        attempts = [Attempt(tuple(sorted(key)), recordable(losses[key])) for key in losses]
        return Harm(limit, recordable(own_loss), tuple(attempts), tuple(dropped), kept_local)

    if within_limit(()):
        return result(())
    all_peers = frozenset(peers)
    alone = {peer: recordable(loss(all_peers - {peer})) for peer in sorted(all_peers)}
    worst_first = sorted(all_peers, key=lambda peer: (-alone[peer], peer))
    for count in range(1, len(worst_first)):
        if within_limit(worst_first[:count]):
            return result(worst_first[:count])
    return result(worst_first, kept_local=True)
