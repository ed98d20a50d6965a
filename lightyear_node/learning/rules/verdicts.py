"""Common steps of the rules other than LIGHTYEAR: refuse unusable models, make the verdicts.

A model with another layout cannot be averaged with ours, and one with NaN or infinite entries would
make the whole mean NaN.  Every rule, FedAvg too, refuses such models first and continues as if they
had not arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightyear_node.learning.guard import recordable
from lightyear_node.learning.rules.base import Candidate, fits
from lightyear_node.learning.weights import release
from lightyear_node.types import PeerName, Reason, Verdict

ENTRY_MAX = 1e120
"""Sums of squares of larger entries, weighted by claimed sample counts (up to 2^62), overflow
double precision: cosines become NaN and AFA drops none.  Only 64-bit weights can be so large."""


@dataclass(frozen=True, slots=True)
class PeerFinding:
    """A rule's result for one peer, which is accepted if the reason is OK."""

    reason: Reason
    weight: float = 0.0
    checks: Mapping[str, float] = field(default_factory=dict)


def usable_peers(
    own: Candidate, peers: Sequence[Candidate]
) -> tuple[list[Candidate], dict[PeerName, PeerFinding]]:
    """Peers that can be averaged, in the order of their names, and findings for the others."""
    usable: list[Candidate] = []
    findings: dict[PeerName, PeerFinding] = {}
    for peer in sorted(peers, key=lambda candidate: candidate.peer):
        if not fits(own.weights, peer.weights):
            findings[peer.peer] = PeerFinding(Reason.SCHEMA_MISMATCH)
        elif not _is_finite(peer.weights):
            findings[peer.peer] = PeerFinding(Reason.NONFINITE)
        else:
            usable.append(peer)
    return usable, findings


def verdicts_of(
    peers: Sequence[Candidate], findings: Mapping[PeerName, PeerFinding]
) -> tuple[Verdict, ...]:
    """One verdict for each peer, in the order given."""
    return tuple(_verdict(peer, findings[peer.peer]) for peer in peers)


def _verdict(peer: Candidate, finding: PeerFinding) -> Verdict:
    accepted = finding.reason is Reason.OK
    checks = {name: recordable(float(value)) for name, value in finding.checks.items()}
    weight = float(finding.weight) if accepted else 0.0
    return Verdict(peer.peer, accepted, finding.reason, None, weight, checks, peer.digest)


def _is_finite(tensors: Mapping[str, Tensor]) -> bool:
    for name, tensor in tensors.items():
        if tensor.numel():
            low, high = (float(end) for end in torch.aminmax(tensor))  # both NaN if any entry is
            release(tensors, name)
            if not max(-low, high) <= ENTRY_MAX:
                return False
    return True
