"""BALANCE: merges the models near our own; the limit shrinks from round to round.

    S_i = { j : ‖θ_i − θ_j‖ ≤ γ exp(−κ t/T) ‖θ_i‖ }
    θ_i ← α θ_i + (1 − α) · (1/|S_i|) Σ_{j ∈ S_i} θ_j

Fang et al., "Byzantine-Robust Decentralized Federated Learning", 2024.  t is counted from 0; T is
the number of rounds: if it is unknown, the limit does not shrink.  An empty S_i leaves θ_i
unchanged: with an empty sum, the formula would shrink the model to α θ_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightyear_node.errors import ConfigError
from lightyear_node.learning.rules.base import Averaging, Candidate, Judgement, RoundContext
from lightyear_node.learning.rules.pairwise import gram, norms
from lightyear_node.learning.rules.verdicts import PeerFinding, usable_peers, verdicts_of
from lightyear_node.learning.validation import Validation
from lightyear_node.types import Reason


@dataclass(frozen=True, slots=True)
class Balance(Averaging):
    gamma: float = 0.3
    kappa: float = 1.0
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.gamma < math.inf:
            raise ConfigError(f"rule balance: gamma is {self.gamma}, not above 0")
        if not 0 <= self.kappa < math.inf:
            raise ConfigError(f"rule balance: kappa is {self.kappa}, not 0 or above")
        if not 0 <= self.alpha < 1:
            raise ConfigError(
                f"rule balance: alpha is {self.alpha}, not at least 0 and below 1",
                hint="alpha is our own model's share; for all of it use rule local",
            )

    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        validation: Validation,
        context: RoundContext,
    ) -> Judgement:
        usable, findings = usable_peers(own, peers)
        passed = context.round / context.rounds if context.rounds else 0.0
        size = float(norms(gram([own.weights]))[0])
        limit = self.gamma * math.exp(-self.kappa * passed) * size
        distances = norms(gram([own.weights, *(p.weights for p in usable)], own.weights))[1:]
        share = (1 - self.alpha) / max(1, int((distances <= limit).sum()))
        for peer, distance in zip(usable, distances, strict=True):
            checks = {"distance": float(distance), "limit": limit}
            near = distance <= limit
            findings[peer.peer] = PeerFinding(Reason.OK if near else Reason.TOO_FAR, share, checks)
        return Judgement(verdicts_of(peers, findings))
