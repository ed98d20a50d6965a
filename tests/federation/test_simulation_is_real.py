"""A simulated federation and a real one are the same federation, bit for bit.

Experiments run in one process; what they find is worth something only if three real nodes, with
TLS, transfers and their own worker processes, end with the same models.
"""

from __future__ import annotations

import pytest
from asking import DEADLINE_S, PATIENT, C, LayOut, all_finished, check_as_simulated

from lightyear_node.config import Malfunction, RuleTerms
from lightyear_node.lab.federation import Federation

SFA, ANA = Malfunction(kind="sfa"), Malfunction(kind="ana")


@pytest.mark.parametrize(
    ("rule", "rounds", "malfunction"),
    [
        (RuleTerms(), 3, ANA),
        pytest.param(RuleTerms(weights="samples"), 2, SFA, marks=pytest.mark.slow),
        pytest.param(RuleTerms(name="afa"), 2, SFA, marks=pytest.mark.slow),
        (RuleTerms(name="ditto", options={"lam": 0.5}), 2, SFA),
        pytest.param(
            RuleTerms(name="fedprox", options={"mu": 0.1}), 2, None, marks=pytest.mark.slow
        ),
    ],
    ids=["lightyear", "lightyear by samples", "afa", "ditto", "fedprox"],
)
def test_three_real_nodes_do_exactly_what_is_simulated(
    lay_out_sites: LayOut, rule: RuleTerms, rounds: int, malfunction: Malfunction | None
) -> None:
    malfunctions = {C: malfunction} if malfunction else {}
    homes = lay_out_sites(rounds=rounds, malfunctions=malfunctions, barrier=PATIENT, rule=rule)
    with Federation(homes) as federation:
        federation.wait_until(all_finished, DEADLINE_S)
        check_as_simulated(federation, rule, rounds)
