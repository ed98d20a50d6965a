"""AFA: weights models by reputation, drops outliers, and lowers the reputation of dropped sites.

    θ = Σ_k p_k n_k θ_k / Σ_k p_k n_k,   p_k = α_k / (α_k + β_k),   α = β = 3 at first
    repeat: s_k = cos(θ_k, θ); m = median, σ = standard deviation (of the population) of the s_k
            mean < m:  drop all s_k < m − ξσ;   otherwise:  drop all s_k > m + ξσ
            ξ ← ξ + Δξ;   until none is dropped
    then    α_k ← α_k + 1 if kept, β_k ← β_k + 1 if dropped
            block k permanently if P(x ≤ ½) > .95, x ~ Beta(α_k, β_k)

Muñoz-González et al., "Byzantine-Robust Federated Machine Learning through Adaptive Model
Averaging", 2019.  Our own model takes part with a reputation of its own, and may be dropped, but is
never blocked.  n_k are sample counts, or 1 each if any is unknown.  A site that sends no model, or
one that cannot be averaged, keeps its reputations.

The state is {"alpha": {name: int}, "beta": {name: int}, "blocked": [name]}.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightyear_node.errors import ConfigError
from lightyear_node.learning.rules.base import Averaging, Candidate, Judgement, RoundContext
from lightyear_node.learning.rules.fedavg import sample_counts
from lightyear_node.learning.rules.pairwise import ROUNDING, Matrix, Vector, divided, gram, norms
from lightyear_node.learning.rules.verdicts import PeerFinding, usable_peers, verdicts_of
from lightyear_node.learning.validation import Validation
from lightyear_node.types import Reason

PRIOR = 3
"""Initial α and β of a site."""
BLOCKED_ABOVE = 0.95


@dataclass(frozen=True, slots=True)
class Afa(Averaging):
    xi: float = 2.0
    xi_step: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.xi < math.inf:
            raise ConfigError(f"rule afa: xi is {self.xi}, not above 0")
        if not 0 <= self.xi_step < math.inf:
            raise ConfigError(f"rule afa: xi_step is {self.xi_step}, not 0 or above")

    def judge(
        self,
        own: Candidate,
        peers: Sequence[Candidate],
        validation: Validation,
        context: RoundContext,
    ) -> Judgement:
        reputations = _Reputations.of(context.state)
        allowed = [peer for peer in peers if peer.peer not in reputations.blocked]
        usable, findings = usable_peers(own, allowed)
        findings |= {
            p.peer: PeerFinding(Reason.BLOCKED) for p in peers if p.peer in reputations.blocked
        }
        sites = [own, *usable]
        trust = np.array([reputations.trust(site.peer) for site in sites])
        influence = trust * np.array(sample_counts(sites), dtype=np.float64)
        outcome = select(gram([site.weights for site in sites]), influence, self.xi, self.xi_step)
        shares = np.where(outcome.kept, influence, 0.0)
        shares /= shares.sum()
        for at, peer in enumerate(usable, start=1):
            reason = Reason.OK if outcome.kept[at] else Reason.OUTLIER
            checks = {
                "cosine": outcome.cosine[at],
                "limit": outcome.limit[at],
                "reputation": trust[at],
            }
            findings[peer.peer] = PeerFinding(reason, shares[at], checks)
        after = reputations.after(
            {s.peer: bool(k) for s, k in zip(sites, outcome.kept, strict=True)}
        )
        return Judgement(verdicts_of(peers, findings), after.without_blocking(own.peer).state())


@dataclass(frozen=True, slots=True)
class AfaOutcome:
    """Which sites were kept; each one's cosine and limit when it was dropped, or at the end."""

    kept: np.ndarray[Any, np.dtype[np.bool_]]
    cosine: Vector
    limit: Vector


def select(products: Matrix, influence: Vector, xi: float, xi_step: float) -> AfaOutcome:
    """The loop above, on the Gram matrix (n, n), which gives the cosines to a weighted sum."""
    kept = np.ones(len(products), dtype=bool)
    cosine, limit = np.zeros(len(products)), np.zeros(len(products))
    while True:
        mix = np.where(kept, influence, 0.0)
        length = math.sqrt(max(0.0, float(mix @ products @ mix)))
        current = divided(products @ mix, norms(products) * length)
        middle, spread = float(np.median(current[kept])), float(np.std(current[kept]))
        reach = max(xi * spread, ROUNDING)
        low = float(np.mean(current[kept])) < middle
        bound = middle - reach if low else middle + reach
        cosine[kept], limit[kept] = current[kept], bound
        dropped = kept & (current < bound if low else current > bound)
        if not dropped.any():
            return AfaOutcome(kept, cosine, limit)
        kept &= ~dropped
        xi += xi_step


def beta_cdf_half(alpha: int, beta: int) -> float:
    """P(x ≤ ½) for x ~ Beta(α, β), α and β integers: that of ≥ α heads in α + β − 1 coin tosses.

    Exact up to the division.
    """
    tosses = alpha + beta - 1
    favourable = sum(math.comb(tosses, heads) for heads in range(alpha, tosses + 1))
    return favourable / (1 << tosses)


@dataclass(frozen=True, slots=True)
class _Reputations:
    alpha: Mapping[str, int]
    beta: Mapping[str, int]
    blocked: frozenset[str]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> _Reputations:
        return cls(
            state.get("alpha", {}), state.get("beta", {}), frozenset(state.get("blocked", ()))
        )

    def trust(self, name: str) -> float:
        alpha, beta = self.alpha.get(name, PRIOR), self.beta.get(name, PRIOR)
        return alpha / (alpha + beta)

    def after(self, kept: Mapping[str, bool]) -> _Reputations:
        alpha, beta = dict(self.alpha), dict(self.beta)
        for name, good in kept.items():
            alpha[name] = alpha.get(name, PRIOR) + good
            beta[name] = beta.get(name, PRIOR) + (not good)
        now = {n for n in kept if beta_cdf_half(alpha[n], beta[n]) > BLOCKED_ABOVE}
        return _Reputations(alpha, beta, self.blocked | now)

    def without_blocking(self, name: str) -> _Reputations:
        return _Reputations(self.alpha, self.beta, self.blocked - {name})

    def state(self) -> dict[str, Any]:
        return {
            "alpha": dict(sorted(self.alpha.items())),
            "beta": dict(sorted(self.beta.items())),
            "blocked": sorted(self.blocked),
        }
