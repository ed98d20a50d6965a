"""Self-centred clipping: clips each peer's difference to the second-largest distance.

    θ_i ← (1/n) Σ_{j ∈ {i} ∪ N(i)} (θ_i + clip(θ_j − θ_i, τ_i)),   clip(z, τ) = min(1, τ/‖z‖) z

He et al., "Byzantine-Robust Decentralized Learning via Self-Centered Clipping", 2022.  The
difference to our own model is clipped, not the model itself.  As a weight in the mean this is
(1/n) min(1, τ/‖z‖).

τ_i is the second-largest of the n distances to our own model, including our own zero.  So if two
peers share the largest distance, nothing is clipped.  A single peer is clipped to zero, as is any
peer while all other models equal ours; a peer with weight zero is refused as too far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightyear_node.learning.rules.base import Averaging, Candidate, Judgement, RoundContext
from lightyear_node.learning.rules.pairwise import gram, norms
from lightyear_node.learning.rules.verdicts import PeerFinding, usable_peers, verdicts_of
from lightyear_node.learning.validation import Validation
from lightyear_node.types import Reason


@dataclass(frozen=True, slots=True)
class SelfCentredClipping(Averaging):
    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        validation: Validation,
        context: RoundContext,
    ) -> Judgement:
        usable, findings = usable_peers(own, peers)
        models = [own.weights, *(peer.weights for peer in usable)]
        distances = norms(gram(models, own.weights)).tolist()
        radius = sorted(distances)[-2] if usable else 0.0
        for peer, distance in zip(usable, distances[1:], strict=True):
            kept = 1.0 if distance <= radius else radius / distance
            reason = Reason.OK if kept > 0 else Reason.TOO_FAR
            checks = {"distance": distance, "limit": radius}
            findings[peer.peer] = PeerFinding(reason, kept / len(models), checks)
        return Judgement(verdicts_of(peers, findings))
