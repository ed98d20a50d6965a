"""FedProx: FedAvg with a proximal term in local training.

    local loss:  F_i(w) + (μ/2) ‖w − w_start‖²

Li et al., "Federated Optimization in Heterogeneous Networks", 2020.  The paper takes μ from
{.001, .01, .1, .5, 1}.  μ = 0 is FedAvg.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightyear_node.errors import ConfigError
from lightyear_node.learning.rules.fedavg import FedAvg


@dataclass(frozen=True, slots=True)
class FedProx(FedAvg):
    mu: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.mu < math.inf:
            raise ConfigError(f"rule fedprox: mu is {self.mu}, not 0 or above")

    @property
    def proximal_strength(self) -> float:
        return self.mu
