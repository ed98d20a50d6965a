"""A simulated federation and a real one are the same federation, bit for bit.

Experiments run in one process; what they find is worth something only if three real nodes, with
TLS, transfers and their own worker processes, end with the same models.
"""

from __future__ import annotations

from asking import DEADLINE_S, C, LayOut, all_finished

from lightyear_node.config import BarrierTerms, Malfunction, RuleTerms
from lightyear_node.lab.federation import Federation
from lightyear_node.lab.simulate import Spec, simulate_apart

ROUNDS, SEED = 3, 7
PATIENT = BarrierTerms(heartbeat=0.5, grace=120.0, suspect=60.0, observe=2.0)
"""Every site waits for every other, as the simulation does."""


def test_three_real_nodes_do_exactly_what_is_simulated(lay_out_sites: LayOut) -> None:
    malfunctions = {C: Malfunction(kind="ana")}
    homes = lay_out_sites(rounds=ROUNDS, malfunctions=malfunctions, barrier=PATIENT)
    with Federation(homes) as federation:
        federation.wait_until(all_finished, DEADLINE_S)
        real = {home.name: federation.rounds(home.name) for home in homes}
    spec = Spec([home.name for home in homes], ROUNDS, SEED, RuleTerms(), malfunctions=malfunctions)
    [simulated] = simulate_apart([spec])
    for name, rounds in simulated.sites.items():
        assert len(rounds) == len(real[name]) == ROUNDS
        for ours, theirs in zip(rounds, real[name], strict=True):
            assert dict(ours.local) == theirs["local"]
            assert dict(ours.merged) == theirs["merged"]
            judged = {v["peer"]: v for v in theirs["verdicts"]}
            assert len(ours.verdicts) == len(judged)
            for verdict in ours.verdicts:
                seen = judged[verdict.peer]
                assert (verdict.accepted, verdict.reason) == (seen["accepted"], seen["reason"])
                assert verdict.score == seen["score"]
                # The same bytes were sent.
                assert verdict.digest == seen["digest"]
