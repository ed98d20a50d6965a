"""Krum: adopts the one model that is closest to its nearest neighbours.

    score(k) = Σ ‖θ_k − θ_l‖²  over the n − f − 2 models l ≠ k nearest to k,   f < (n − 2)/2
    θ_i ← θ_argmin score

Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", 2017.
n includes our own model, which may be the chosen one; then no peer is accepted.  Of equal scores
ours comes first, then the order of names.

`faulty` is f; by default the largest that n allows.  If n allows no such f (fewer than two peers,
or fewer than 2 `faulty` + 2), Krum guarantees nothing, and our own model is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightyear_node.errors import ConfigError
from lightyear_node.learning.rules.base import (
    Averaging,
    Candidate,
    Judgement,
    MergeShare,
    RoundContext,
)
from lightyear_node.learning.rules.pairwise import Matrix, Vector, gram, squared_distances
from lightyear_node.learning.rules.verdicts import PeerFinding, usable_peers, verdicts_of
from lightyear_node.learning.validation import Validation
from lightyear_node.learning.weights import layout_of, release
from lightyear_node.types import Reason, Round


@dataclass(frozen=True, slots=True)
class Krum(Averaging):
    faulty: int | None = None

    def __post_init__(self) -> None:
        if self.faulty is not None and self.faulty < 0:
            raise ConfigError(f"rule krum: faulty is {self.faulty}, not 0 or above")

    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        validation: Validation,
        context: RoundContext,
    ) -> Judgement:
        usable, findings = usable_peers(own, peers)
        sites = [own, *usable]
        faulty = faulty_max(len(sites)) if self.faulty is None else self.faulty
        if not 0 <= faulty <= faulty_max(len(sites)):
            findings |= {peer.peer: PeerFinding(Reason.NOT_SELECTED) for peer in usable}
            return Judgement(verdicts_of(peers, findings))
        squares = squared_distances(gram([site.weights for site in sites], own.weights))
        scores = krum_scores(squares, faulty)
        chosen = int(np.argmin(scores))  # the first of equal scores
        for at, peer in enumerate(usable, start=1):
            checks = {
                "krum_score": scores[at],
                "limit": scores[chosen],
                "distance": float(np.sqrt(squares[0, at])),
            }
            taken = at == chosen
            reason = Reason.OK if taken else Reason.NOT_SELECTED
            findings[peer.peer] = PeerFinding(reason, float(taken), checks)
        return Judgement(verdicts_of(peers, findings))

    def merge(
        self, own: Mapping[str, Tensor], shares: Sequence[MergeShare], round: Round
    ) -> Iterator[tuple[str, Tensor]]:
        """The chosen model, bit for bit."""
        chosen = shares[0].weights if shares else own
        for name in layout_of(own).entries:
            yield name, chosen[name]
            release(chosen, name)


def faulty_max(sites: int) -> int:
    """The largest f < (n − 2)/2; below zero if there is none."""
    return (sites - 3) // 2


def krum_scores(squares: Matrix, faulty: int) -> Vector:
    """Scores (n,) from squared distances (n, n)."""
    sites = len(squares)
    others = squares[~np.eye(sites, dtype=bool)].reshape(sites, sites - 1)
    return np.asarray(np.sort(others, axis=1)[:, : sites - faulty - 2].sum(axis=1))
