"""Local: no peer's model is merged; each site trains alone.

    θ_i ← θ_i

The baseline that a federation must improve on.  Peers' models are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightyear_node.learning.rules.base import Averaging, Candidate, Judgement, RoundContext
from lightyear_node.learning.rules.verdicts import PeerFinding, verdicts_of
from lightyear_node.learning.validation import Validation
from lightyear_node.types import Reason


@dataclass(frozen=True, slots=True)
class Local(Averaging):
    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        validation: Validation,
        context: RoundContext,
    ) -> Judgement:
        refused = PeerFinding(Reason.REFUSED_BY_RULE)
        return Judgement(verdicts_of(peers, {peer.peer: refused for peer in peers}))
