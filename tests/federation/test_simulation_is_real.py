"""A simulated federation and a real one are the same federation, bit for bit.

Experiments run in one process; their results are valid only if three real nodes, with TLS,
transfers and worker processes, end with the same models.
"""

from __future__ import annotations

import pytest

from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.lab.federation import Federation
from lightyear_node.lab.malfunctions import MalfunctionConfig
from tests.support.site_queries import (
    PATIENT,
    A,
    C,
    LayOut,
    check_as_simulated,
    durable_values,
    run_in_lockstep,
)

SFA, ANA = MalfunctionConfig(kind="sfa"), MalfunctionConfig(kind="ana")


@pytest.mark.parametrize(
    ("rule", "rounds", "malfunction"),
    [
        (RuleConfig(), 3, ANA),
        (RuleConfig(weights="samples"), 2, SFA),
        (RuleConfig(name="afa"), 2, SFA),
        (RuleConfig(name="ditto", options={"lam": 0.5}), 2, SFA),
        (RuleConfig(name="fedprox", options={"mu": 0.1}), 2, None),
    ],
    ids=["lightyear", "lightyear by samples", "afa", "ditto", "fedprox"],
)
def test_three_real_nodes_match_the_simulation_exactly(
    lay_out_sites: LayOut, rule: RuleConfig, rounds: int, malfunction: MalfunctionConfig | None
) -> None:
    malfunctions = {C: malfunction} if malfunction else {}
    homes = lay_out_sites(rounds=1, malfunctions=malfunctions, barrier=PATIENT, rule=rule)
    with Federation(homes) as federation:
        run_in_lockstep(federation, rounds)
        check_as_simulated(federation, rule, rounds)


@pytest.mark.parametrize(
    ("exchange", "rule", "malfunction"),
    [
        (ExchangeConfig(dtype="bfloat16"), RuleConfig(), SFA),
        (
            ExchangeConfig(dtype="float16", include=("*.weight",), exclude=("9.*", "stem.*")),
            RuleConfig(name="fedavg"),
            None,
        ),
    ],
    ids=["bfloat16", "some tensors as float16"],
)
def test_rounded_weights_match_the_simulation(
    lay_out_sites: LayOut,
    exchange: ExchangeConfig,
    rule: RuleConfig,
    malfunction: MalfunctionConfig | None,
) -> None:
    """Every site has its own model in full precision and the others' rounded, as simulated."""
    malfunctions = {C: malfunction} if malfunction else {}
    homes = lay_out_sites(
        rounds=1, malfunctions=malfunctions, barrier=PATIENT, rule=rule, exchange=exchange
    )
    with Federation(homes) as federation:
        statuses = run_in_lockstep(federation, 3)
        simulated = check_as_simulated(federation, rule, 3, exchange)
        heard = statuses[A]
    assert heard is not None
    # Three rounds of two peers, none of them fetched twice.
    assert heard["bytes"]["raw"] == 6 * simulated.update_bytes
    work, manifest = (
        durable_values(homes[0])["work"],
        durable_values(homes[0])["manifest"]["manifest"],
    )
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
