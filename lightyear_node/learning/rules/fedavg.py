"""FedAvg: the mean of everybody, weighted by sample counts where all are known.

    θ_i ← Σ_j n_j θ_j / Σ_j n_j,   j over ourselves and all peers

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.
The baseline without protection: only models that have no mean are refused (see `findings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightyear_node.learning.probe import Probe
from lightyear_node.learning.rules.base import Averaging, Candidate, Judgement, Turn
from lightyear_node.learning.rules.findings import Finding, sift, verdicts_of
from lightyear_node.records import Reason


@dataclass(frozen=True, slots=True)
class FedAvg(Averaging):
    def judge(
        self, own: Candidate, peers: Sequence[Candidate], probe: Probe, turn: Turn
    ) -> Judgement:
        usable, findings = sift(own, peers)
        counts = sample_counts([own, *usable])
        for peer, count in zip(usable, counts[1:], strict=True):
            findings[peer.peer] = Finding(Reason.OK, count / sum(counts))
        return Judgement(verdicts_of(peers, findings))


def sample_counts(sites: Sequence[Candidate]) -> list[int]:
    """How much each site's model counts: its samples, or 1 each if any site's are unknown."""
    known = all(site.samples > 0 for site in sites)
    return [site.samples if known else 1 for site in sites]
