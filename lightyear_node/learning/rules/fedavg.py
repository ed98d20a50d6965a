"""FedAvg: the mean of everybody, weighted by sample counts where all are known.

The baseline without protection.  Only a model of another shape is refused: it has no mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightyear_node.learning.probe import Probe
from lightyear_node.learning.rules.base import Candidate, Share, fits, mixed
from lightyear_node.records import Reason, Round, Verdict


@dataclass(frozen=True, slots=True)
class FedAvg:
    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        probe: Probe,
        round: Round,
        *,
        start: Mapping[str, Tensor] | None = None,
    ) -> list[Verdict]:
        fitting = {peer.peer for peer in peers if fits(own.weights, peer.weights)}
        counted = [own, *(peer for peer in peers if peer.peer in fitting)]
        known = all(site.samples > 0 for site in counted)
        total = sum(site.samples if known else 1 for site in counted)
        return [
            Verdict(
                peer.peer,
                accepted=peer.peer in fitting,
                reason=Reason.OK if peer.peer in fitting else Reason.SCHEMA_MISMATCH,
                weight=(peer.samples if known else 1) / total if peer.peer in fitting else 0.0,
                digest=peer.digest,
            )
            for peer in peers
        ]

    def merge(
        self, own: Mapping[str, Tensor], shares: Sequence[Share], round: Round
    ) -> Iterator[tuple[str, Tensor]]:
        return mixed(own, shares)
