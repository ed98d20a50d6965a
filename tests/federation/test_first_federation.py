"""The smallest federation of real nodes that `make test` runs: one broken site, one killed.

Other files test each of these in detail.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from lightyear_node.lab.federation import Federation
from lightyear_node.lab.malfunctions import MalfunctionConfig
from tests.support.site_queries import (
    DEADLINE_S,
    QUICK,
    A,
    B,
    C,
    LayOut,
    Records,
    all_finished,
    check_histories,
)

pytestmark = pytest.mark.quick

ROUNDS = 4


@pytest.fixture(scope="module")
def federation(lay_out_once: LayOut) -> Iterator[Federation]:
    """Three sites in their second round; site-c sends flipped signs."""
    homes = lay_out_once(
        rounds=ROUNDS, malfunctions={C: MalfunctionConfig(kind="sfa")}, barrier=QUICK
    )
    with Federation(homes) as federation:
        federation.wait_until(lambda s: all(x and x["round"] for x in s.values()), DEADLINE_S)
        yield federation


def test_a_killed_site_restarts_and_all_rounds_complete(
    federation: Federation, records: Records
) -> None:
    federation.kill(A, signal.SIGKILL)
    federation.wait_for_exit(A)
    federation.start(A)
    federation.wait_until(all_finished, DEADLINE_S)
    check_histories(list(federation.homes.values()), records)


def test_a_broken_site_is_rejected_by_all_others(federation: Federation) -> None:
    federation.wait_until(all_finished, DEADLINE_S)
    for judge, other in ((A, B), (B, A)):
        verdicts = [v for entry in federation.rounds(judge) for v in entry["verdicts"]]
        # Missing if a round closed without it; never accepted.
        assert not [v for v in verdicts if v["peer"] == C and v["accepted"]]
        assert [v for v in verdicts if v["peer"] == C and v["reason"] == "too_far"]
        assert [v for v in verdicts if v["peer"] == other and v["accepted"]]
