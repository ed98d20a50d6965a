"""Self-centred clipping: everybody may pull, but nobody farther than the second-farthest.

    θ_i ← (1/n) Σ_{j ∈ {i} ∪ N(i)} (θ_i + clip(θ_j − θ_i, τ_i)),   clip(z, τ) = min(1, τ/‖z‖) z

He et al., "Byzantine-Robust Decentralized Learning via Self-Centered Clipping", 2022.  The
difference to our own model is clipped, never the model itself.  As a weight in the mean this is
(1/n) min(1, τ/‖z‖).

τ_i is the second-largest of the n distances to our own model, our own zero being one of them.  So
if two are equally far and farthest, nothing is clipped; and a single peer, against whom there is no
second opinion, is clipped to nothing (as is anybody, while all others but one are our own twins):
what has no weight left is refused as too far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightyear_node.learning.probe import Probe
from lightyear_node.learning.rules.base import Averaging, Candidate, Judgement, Turn
from lightyear_node.learning.rules.findings import Finding, sift, verdicts_of
from lightyear_node.learning.rules.geometry import gram, norms
from lightyear_node.records import Reason


@dataclass(frozen=True, slots=True)
class SelfCentredClipping(Averaging):
    def judge(
        self, own: Candidate, peers: Sequence[Candidate], probe: Probe, turn: Turn
    ) -> Judgement:
        usable, findings = sift(own, peers)
        models = [own.weights, *(peer.weights for peer in usable)]
        distances = norms(gram(models, own.weights)).tolist()
        radius = sorted(distances)[-2] if usable else 0.0
        for peer, distance in zip(usable, distances[1:], strict=True):
            kept = 1.0 if distance <= radius else radius / distance
            reason = Reason.OK if kept > 0 else Reason.TOO_FAR
            checks = {"distance": distance, "limit": radius}
            findings[peer.peer] = Finding(reason, kept / len(models), checks)
        return Judgement(verdicts_of(peers, findings))
