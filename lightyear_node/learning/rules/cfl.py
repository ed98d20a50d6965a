"""Clustered federated learning as a defence: splits the models in two, follows the majority.

    Δ_j = θ_j − θ_start,   distance(j, k) = 1 − cos(Δ_j, Δ_k)
    complete-linkage clustering into 2;   θ_i ← the unweighted mean of the larger cluster

Sattler et al., "On the Byzantine Robustness of Clustered Federated Learning", 2020.  Δ is the
difference to our own model before this round's training, not the weights themselves, which all have
nearly the same direction because of the common start.  If that model is not known, our current one
takes its place (our own Δ is then zero).

The split is always made, so at least one model is left out.  Of two clusters of equal size ours is
followed: with a single peer, none is accepted.  If the larger cluster is not ours, the mean is that
of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from lightyear_node.learning.rules.base import Averaging, Candidate, Judgement, RoundContext
from lightyear_node.learning.rules.pairwise import Matrix, cosines, gram
from lightyear_node.learning.rules.verdicts import PeerFinding, usable_peers, verdicts_of
from lightyear_node.learning.validation import Validation
from lightyear_node.types import Reason


@dataclass(frozen=True, slots=True)
class Cfl(Averaging):
    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        validation: Validation,
        context: RoundContext,
    ) -> Judgement:
        usable, findings = usable_peers(own, peers)
        start = own.weights if context.start is None else context.start
        cosine = cosines(gram([site.weights for site in (own, *usable)], start))
        clusters = bipartition(1 - cosine)
        followed = max(clusters, key=lambda cluster: (len(cluster), 0 in cluster))
        for at, peer in enumerate(usable, start=1):
            size = next(len(cluster) for cluster in clusters if at in cluster)
            reason = Reason.OK if at in followed else Reason.OTHER_CLUSTER
            checks = {"cosine": cosine[0, at], "cluster": size, "limit": len(followed)}
            findings[peer.peer] = PeerFinding(reason, 1 / len(followed), checks)
        return Judgement(verdicts_of(peers, findings))


def bipartition(distances: Matrix) -> list[frozenset[int]]:
    """Complete linkage: join the two clusters whose farthest members are nearest, until two remain.

    `distances` is (n, n).  Of equal distances the first pair is joined, in the order of the rows.
    """
    clusters = [frozenset({at}) for at in range(len(distances))]
    while len(clusters) > 2:
        left, right = min(
            combinations(clusters, 2),
            key=lambda pair: max(distances[a, b] for a in pair[0] for b in pair[1]),
        )
        at = clusters.index(left)
        clusters[at] = left | right
        clusters.remove(right)
    return clusters
