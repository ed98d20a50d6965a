"""A simulated federation and a real one are the same federation, bit for bit.

Experiments run in one process; what they find is worth something only if three real nodes, with
TLS, transfers and their own worker processes, end with the same models.
"""

from __future__ import annotations

import pytest
from asking import (
    DEADLINE_S,
    PATIENT,
    A,
    C,
    LayOut,
    all_finished,
    check_as_simulated,
    kept_by,
    repeated_when_out_of_step,
)

from lightyear_node.config.agreement import ExchangeTerms, RuleTerms
from lightyear_node.config.site import Malfunction
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
@repeated_when_out_of_step
def test_three_real_nodes_do_exactly_what_is_simulated(
    lay_out_sites: LayOut, rule: RuleTerms, rounds: int, malfunction: Malfunction | None
) -> None:
    malfunctions = {C: malfunction} if malfunction else {}
    homes = lay_out_sites(rounds=rounds, malfunctions=malfunctions, barrier=PATIENT, rule=rule)
    with Federation(homes) as federation:
        federation.wait_until(all_finished, DEADLINE_S)
        check_as_simulated(federation, rule, rounds)


@pytest.mark.parametrize(
    ("exchange", "rule", "malfunction"),
    [
        (ExchangeTerms(dtype="bfloat16"), RuleTerms(), SFA),
        pytest.param(
            ExchangeTerms(dtype="float16", include=("*.weight",), exclude=("9.*", "stem.*")),
            RuleTerms(name="fedavg"),
            None,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["bfloat16", "some tensors as float16"],
)
@repeated_when_out_of_step
def test_rounded_weights_give_what_is_simulated(
    lay_out_sites: LayOut,
    exchange: ExchangeTerms,
    rule: RuleTerms,
    malfunction: Malfunction | None,
) -> None:
    """Every site has its own model in full and the others' rounded, in reality as simulated."""
    malfunctions = {C: malfunction} if malfunction else {}
    homes = lay_out_sites(
        rounds=3, malfunctions=malfunctions, barrier=PATIENT, rule=rule, exchange=exchange
    )
    with Federation(homes) as federation:
        statuses = federation.wait_until(all_finished, DEADLINE_S)
        simulated = check_as_simulated(federation, rule, 3, exchange)
        heard = statuses[A]
    assert heard is not None
    # Three rounds of two peers, none of them fetched twice.
    assert heard["bytes"]["raw"] == 6 * simulated.update_bytes
    work, manifest = kept_by(homes[0])["work"], kept_by(homes[0])["manifest"]["manifest"]
    assert work["own"] != work["outgoing"] == manifest["update"]["digest"]
    assert (manifest["dtype"], manifest["raw_bytes"]) == (exchange.dtype, simulated.update_bytes)
    updates, models = homes[0].state_dir / "updates", homes[0].state_dir / "models"
    full = [path.stat().st_size for path in models.glob("*.safetensors")]
    assert len(set(full)) == 1
    assert (updates / work["own"]).stat().st_size == full[0]
    assert simulated.update_bytes == (updates / work["outgoing"]).stat().st_size
    assert simulated.update_bytes == pytest.approx(full[0] / 2, rel=0.05)
    log = homes[0].log.read_text()
    assert all(
        (f"no tensor of the model matches '{one}'" in log) == ("stem" in one)
        for one in exchange.exclude
    )
