"""What the federation is worth to a site: its federated model against one trained alone.

In every round both models are scored on the same samples, which judged no peer in that round
(`confirmation`).  The mean of the paired differences is the gain.  One round has few samples, so
the gains of the last rounds are taken together.  The federated model is served if

    gain > MARGIN · standard error            over the last rounds, with a lower loss, or
    gain > CLEAR_MARGIN · standard error      over the last rounds, whatever the loss, and
    gain > −NEWEST_MARGIN · standard error    in the newest round,

and stays until its gain is below −MARGIN · standard error, or its loss is higher without a clear
gain.  Few decisions differ between two good models, so that chance often decides about them alone;
losses measure every sample.  The last condition limits what a peer achieves that behaves well for
some rounds and then sends a harmful model.  Equal models, as after rounds without a merge, have no
gain: the one trained alone is served.

Pure: the caller measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightyear_node.types import PairedScores, Served, Worth

ROUNDS = 4
"""Rounds that are taken together: so many that each validation sample confirms about twice."""
MARGIN = 0.5
CLEAR_MARGIN = 1.5
"""A model may decide better although its loss is higher: if it is wrong, but sure of it."""
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


def weigh(newest: PairedScores, losses: PairedScores | None, before: Worth | None) -> Worth:
    """Add the newest round's comparison to those before it, and choose the model to serve.

    `losses` compares the losses if `newest` is about decisions; None if `newest` is about losses.
    """
    found = Worth(
        unit="loss" if losses is None else "decisions",
        recent=(*(before.recent if before is not None else ()), newest)[-ROUNDS:],
        served=Served.ALONE,
        losses=() if losses is None else (*(before.losses if before else ()), losses)[-ROUNDS:],
    )
    served_before = before is not None and before.served is Served.FEDERATED
    margin = (-MARGIN if served_before else MARGIN) if found.lower_loss else CLEAR_MARGIN
    better = found.gain > margin * found.error and newest.gain > -NEWEST_MARGIN * newest.error
    return replace(found, served=Served.FEDERATED) if better else found
