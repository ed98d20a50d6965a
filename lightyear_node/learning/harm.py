"""Do no harm: what the accepted models make of ours together, measured before it is kept.

Every peer was judged alone, and honest peers of other hospitals can look bad alone; so what passes
may still do harm together, round after round.  The merged model is therefore measured on V_i:

    L(merged) ≤ L_i + h ln C,   in the first round L(merged) ≤ max(L_i + h ln C, ln C)

with ln C, the loss of guessing, as the unit.  Otherwise the worst contributor is left out and its
part of the mean is ours, until the rest is harmless or nobody is left.

Why not a share of our advantage, ln C − L_i: merging honest models costs most while that is small,
and sites that then leave each other out never find together again.  For the same reason guessing is
good enough in the first round: the mean of models that have just left a common start is often much
worse than each of them on its own data, and yet what the next rounds are best begun with.

The worst is the one whose own part, merged with our model alone, gives the greatest loss.  That
asks each of them what it does to *our* model, in the weight that it has, so neither a good loss of
a model that cannot be averaged with ours helps, nor can others make an honest one look bad.  It
costs at most two forward passes per peer; leaving out each of them in turn would cost their square.

Pure: the loss of a merge is asked from whoever can merge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from lightyear_node.learning.guard import recordable
from lightyear_node.records import Attempt, Harm, PeerName


def limit_of(round: int, own_loss: float, chance_loss: float, allowed: float) -> float:
    """The loss up to which a merged model is kept."""
    if not math.isfinite(own_loss):
        return recordable(own_loss)  # whatever has a loss at all is no worse
    limit = own_loss + allowed * chance_loss
    return max(limit, chance_loss) if round == 0 else limit


def weigh(
    peers: Sequence[PeerName],
    loss_without: Callable[[Collection[PeerName]], float],
    *,
    own_loss: float,
    limit: float,
) -> Harm:
    """Who must be left out of a merge of these; the answer depends on no order of arrival.

    `loss_without` merges all but the given ones, and measures that.
    """
    tried: dict[frozenset[PeerName], float] = {}

    def loss(without: Collection[PeerName]) -> float:
        key = frozenset(without)
        if key not in tried:
            tried[key] = loss_without(key)
        return tried[key]

    def harmless(without: Collection[PeerName]) -> bool:
        return math.isfinite(loss(without)) and loss(without) <= limit

    def told(dropped: Sequence[PeerName], *, kept_local: bool = False) -> Harm:
        attempts = [Attempt(tuple(sorted(key)), recordable(tried[key])) for key in tried]
        return Harm(limit, recordable(own_loss), tuple(attempts), tuple(dropped), kept_local)

    if harmless(()):
        return told(())
    everybody = frozenset(peers)
    alone = {peer: recordable(loss(everybody - {peer})) for peer in sorted(everybody)}
    worst_first = sorted(everybody, key=lambda peer: (-alone[peer], peer))
    for count in range(1, len(worst_first)):
        if harmless(worst_first[:count]):
            return told(worst_first[:count])
    return told(worst_first, kept_local=True)
