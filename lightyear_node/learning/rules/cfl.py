"""Clustered federated learning, used as a defence: split in two, follow the majority.

    Δ_j = θ_j − θ_start,   distance(j, k) = 1 − cos(Δ_j, Δ_k)
    complete-linkage clustering into 2;   θ_i ← the unweighted mean of the larger cluster

Sattler et al., "On the Byzantine Robustness of Clustered Federated Learning", 2020.  What is
compared is how far everybody has moved from our own model before this round's training, not the
weights themselves, which all point the same way because the sites began together.  Where that
start is not known, differences from our own model take its place (ours is then without direction).

The split is always made, so someone is always left out.  Of two clusters of one size ours is
followed: with a single peer nobody is accepted.  If the larger one is not ours, the mean is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from lightyear_node.learning.probe import Probe
from lightyear_node.learning.rules.base import Averaging, Candidate, Judgement, Turn
from lightyear_node.learning.rules.findings import Finding, sift, verdicts_of
from lightyear_node.learning.rules.geometry import Matrix, cosines, gram
from lightyear_node.records import Reason


@dataclass(frozen=True, slots=True)
class Cfl(Averaging):
    def judge(
        self, own: Candidate, peers: Sequence[Candidate], probe: Probe, turn: Turn
    ) -> Judgement:
        usable, findings = sift(own, peers)
        start = own.weights if turn.start is None else turn.start
        cosine = cosines(gram([site.weights for site in (own, *usable)], start))
        clusters = bipartition(1 - cosine)
        followed = max(clusters, key=lambda cluster: (len(cluster), 0 in cluster))
        for at, peer in enumerate(usable, start=1):
            size = next(len(cluster) for cluster in clusters if at in cluster)
            reason = Reason.OK if at in followed else Reason.OTHER_CLUSTER
            checks = {"cosine": cosine[0, at], "cluster": size, "limit": len(followed)}
            findings[peer.peer] = Finding(reason, 1 / len(followed), checks)
        return Judgement(verdicts_of(peers, findings))


def bipartition(distances: Matrix) -> list[frozenset[int]]:
    """Complete linkage: join the two clusters whose farthest members are nearest, until two remain.

    Among equal distances the first pair is joined, in the order of the rows.
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
