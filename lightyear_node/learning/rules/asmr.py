"""ASMR: drops the models with the largest angles to the others.

    distance(k) = mean over l ≠ k of 1 − cos(θ_k, θ_l),   density(k) = 1 / distance(k)
    factor(k)   = density(k) / mean density
    sort the factors, cut at the largest gap, average the models above it

From the authors of LIGHTYEAR: "Angular Support for Malfunctioning Client Resilience in Federated
Learning".  Our own model takes part and may fall below the cut; the mean is then that of others.
If all factors are equal, as with a single peer, there is no gap and all are kept.  The mean is
unweighted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightyear_node.learning.rules.base import Averaging, Candidate, Judgement, RoundContext
from lightyear_node.learning.rules.pairwise import ROUNDING, Matrix, Vector, cosines, gram
from lightyear_node.learning.rules.verdicts import PeerFinding, usable_peers, verdicts_of
from lightyear_node.learning.validation import Validation
from lightyear_node.types import Reason

GAP_MIN = 1e-9
"""Factors have a mean of 1; smaller gaps are rounding errors."""


@dataclass(frozen=True, slots=True)
class Asmr(Averaging):
    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        validation: Validation,
        context: RoundContext,
    ) -> Judgement:
        usable, findings = usable_peers(own, peers)
        if usable:
            factors = outlier_factors(cosines(gram([s.weights for s in (own, *usable)])))
            limit = cut(factors)
            share = 1 / int((factors >= limit).sum())
            for peer, factor in zip(usable, factors[1:], strict=True):
                reason = Reason.OK if factor >= limit else Reason.OUTLIER
                checks = {"outlier_factor": factor, "limit": limit}
                findings[peer.peer] = PeerFinding(reason, share, checks)
        return Judgement(verdicts_of(peers, findings))


def outlier_factors(cosine: Matrix) -> Vector:
    """(n,) from cosines (n, n), n ≥ 2: low for models far from all others."""
    sites = len(cosine)
    distance = 1 - cosine
    np.fill_diagonal(distance, 0.0)
    density = 1 / np.maximum(distance.sum(axis=1) / (sites - 1), ROUNDING)
    return np.asarray(density / density.mean())


def cut(factors: Vector) -> float:
    """The smallest factor above the largest gap; of equal gaps the lowest, which keeps more."""
    ordered = np.sort(factors)
    gaps = np.diff(ordered)
    if gaps.max() <= GAP_MIN:
        return float(ordered[0])
    return float(ordered[int(np.argmax(gaps)) + 1])
