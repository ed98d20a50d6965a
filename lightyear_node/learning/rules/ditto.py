"""Ditto: FedAvg for the shared model, and a personal model trained at each site.

    personal model v:  v ← v − η (∇F_i(v) + λ (v − w)),   w the shared model

Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", 2021.  v is not
exchanged; it is the one that is evaluated and used.  λ = 0 is FedAvg with no personal model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightyear_node.errors import ConfigError
from lightyear_node.learning.rules.fedavg import FedAvg


@dataclass(frozen=True, slots=True)
class Ditto(FedAvg):
    lam: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.lam < math.inf:
            raise ConfigError(f"rule ditto: lam is {self.lam}, not 0 or above")

    @property
    def personal_strength(self) -> float:
        return self.lam
