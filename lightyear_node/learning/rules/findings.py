"""What rules other than LIGHTYEAR do alike: set aside what has no mean, and write the verdicts.

A model with another layout cannot be added to ours.  One with an entry that is no number has no
mean and no distance: averaged in, it would make every entry NaN at once, which no formula of any
paper means.  So every rule, FedAvg too, refuses such models first, and goes on as if they had not
come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightyear_node.learning.guard import recordable
from lightyear_node.learning.rules.base import Candidate, fits
from lightyear_node.learning.weights import let_go
from lightyear_node.records import PeerName, Reason, Verdict

ENTRY_MAX = 1e145
"""Squares of larger entries, added up, overflow double precision; only 64-bit weights get there."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule says about one peer; the peer is accepted if the reason is OK."""

    reason: Reason
    weight: float = 0.0
    checks: Mapping[str, float] = field(default_factory=dict)


def sift(
    own: Candidate, peers: Sequence[Candidate]
) -> tuple[list[Candidate], dict[PeerName, Finding]]:
    """The peers that can be averaged, in the order of their names, and why the others cannot."""
    usable: list[Candidate] = []
    findings: dict[PeerName, Finding] = {}
    for peer in sorted(peers, key=lambda candidate: candidate.peer):
        if not fits(own.weights, peer.weights):
            findings[peer.peer] = Finding(Reason.SCHEMA_MISMATCH)
        elif not _is_finite(peer.weights):
            findings[peer.peer] = Finding(Reason.NONFINITE)
        else:
            usable.append(peer)
    return usable, findings


def verdicts_of(
    peers: Sequence[Candidate], findings: Mapping[PeerName, Finding]
) -> tuple[Verdict, ...]:
    """One verdict for each peer, in the order given."""
    return tuple(_verdict(peer, findings[peer.peer]) for peer in peers)


def _verdict(peer: Candidate, finding: Finding) -> Verdict:
    accepted = finding.reason is Reason.OK
    checks = {name: recordable(float(value)) for name, value in finding.checks.items()}
    weight = float(finding.weight) if accepted else 0.0
    return Verdict(peer.peer, accepted, finding.reason, None, weight, checks, peer.digest)


def _is_finite(tensors: Mapping[str, Tensor]) -> bool:
    for name, tensor in tensors.items():
        if tensor.numel():
            low, high = (float(end) for end in torch.aminmax(tensor))  # both NaN if any entry is
            let_go(tensors, name)
            if not max(-low, high) <= ENTRY_MAX:
                return False
    return True
