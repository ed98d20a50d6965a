"""Local: nobody's model is taken, each site trains alone.

    θ_i ← θ_i

What any federation has to be better than.  The peers' models are not even read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightyear_node.learning.probe import Probe
from lightyear_node.learning.rules.base import Averaging, Candidate, Judgement, Turn
from lightyear_node.learning.rules.findings import Finding, verdicts_of
from lightyear_node.records import Reason


@dataclass(frozen=True, slots=True)
class Local(Averaging):
    def judge(
        self, own: Candidate, peers: Sequence[Candidate], probe: Probe, turn: Turn
    ) -> Judgement:
        refused = Finding(Reason.REFUSED_BY_RULE)
        return Judgement(verdicts_of(peers, {peer.peer: refused for peer in peers}))
