"""FedAvg: the mean of all models, weighted by sample counts if all are known.

    θ_i ← Σ_j n_j θ_j / Σ_j n_j,   j over ourselves and all peers

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.
The baseline without protection: it refuses only models that cannot be averaged (see `verdicts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightyear_node.learning.rules.base import Averaging, Candidate, Judgement, RoundContext
from lightyear_node.learning.rules.verdicts import PeerFinding, usable_peers, verdicts_of
from lightyear_node.learning.validation import Validation
from lightyear_node.types import Reason


@dataclass(frozen=True, slots=True)
class FedAvg(Averaging):
    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        validation: Validation,
        context: RoundContext,
    ) -> Judgement:
        usable, findings = usable_peers(own, peers)
        counts = sample_counts([own, *usable])
        for peer, count in zip(usable, counts[1:], strict=True):
            findings[peer.peer] = PeerFinding(Reason.OK, count / sum(counts))
        return Judgement(verdicts_of(peers, findings))


def sample_counts(sites: Sequence[Candidate]) -> list[int]:
    """Each site's number of samples, or 1 each if any is unknown."""
    known = all(site.samples > 0 for site in sites)
    return [site.samples if known else 1 for site in sites]
