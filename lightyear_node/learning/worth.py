"""What the federation is worth to a site: its federated model against one trained alone.

In every round both models are scored on the same samples, which judged no peer in that round
(`confirmation`).  The mean of the paired differences is the gain.  One round has few samples, so
the gains of the last rounds are taken together.  The federated model is served if

    gain > MARGIN · standard error                over the last rounds, and
    gain > −NEWEST_MARGIN · standard error        in the newest round,

and stays until its gain is below −MARGIN · standard error.  The second condition limits what a peer
achieves that behaves well for some rounds and then sends a harmful model.  Equal models, as after
rounds without a merge, have no gain: the one trained alone is served.

Pure: the caller measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightyear_node.types import PairedScores, Served, Worth

ROUNDS = 4
"""Rounds that are taken together: so many that each validation sample confirms about twice."""
MARGIN = 0.5
NEWEST_MARGIN = 1.0


def comparison(federated: Sequence[float], alone: Sequence[float]) -> PairedScores:
    """Compare the scores of two models on the same samples; higher scores are better."""
    count = len(federated)
    if count == 0:
        raise ValueError("there is no sample to compare two models on")
    differences = [left - right for left, right in zip(federated, alone, strict=True)]
    gain = math.fsum(differences) / count
    variance = math.fsum((one - gain) ** 2 for one in differences) / max(1, count - 1)
    return PairedScores(count, gain, variance, math.fsum(federated) / count)


def weigh(newest: PairedScores, before: Worth | None, unit: str) -> Worth:
    """Add the newest round's comparison to those before it, and choose the model to serve."""
    recent = (*(before.recent if before is not None else ()), newest)[-ROUNDS:]
    served_before = before is not None and before.served is Served.FEDERATED
    found = Worth(unit, recent, Served.ALONE)
    margin = -MARGIN * found.error if served_before else MARGIN * found.error
    better = found.gain > margin and newest.gain > -NEWEST_MARGIN * newest.error
    return Worth(unit, recent, Served.FEDERATED if better else Served.ALONE)
