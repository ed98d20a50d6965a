"""A site whose journal is altered stops and reports it; the others continue."""

from __future__ import annotations

import json
import sqlite3
import urllib.error
import urllib.request

import pytest

from lightyear_node.lab.federation import Federation, SiteHome, Statuses
from tests.support.site_queries import DEADLINE_S, A, C, LayOut, durable_values, metrics_of


def problems_of(home: SiteHome) -> list[str]:
    """Return the problems that `/readyz` reports."""
    try:
        with urllib.request.urlopen(f"http://{home.http_address}/readyz", timeout=10) as answer:
            return list(json.load(answer)["problems"])
    except urllib.error.HTTPError as refusal:
        return list(json.load(refusal)["problems"])


def has_reached(name: str, round: int) -> object:
    def holds(statuses: Statuses) -> bool:
        status = statuses[name]  # type: ignore[index]
        return status is not None and status["round"] >= round

    return holds


@pytest.mark.slow
def test_a_site_with_an_altered_journal_stops_and_the_others_continue(
    lay_out_sites: LayOut,
) -> None:
    homes = lay_out_sites(rounds=400)
    c = homes[2]
    with Federation(homes) as federation:
        federation.wait_until(has_reached(C, 1), DEADLINE_S)  # type: ignore[arg-type]
        assert problems_of(c) == []
        with sqlite3.connect(c.state_dir / "journal.db", timeout=30) as db:
            db.execute("UPDATE records SET body = '{}' WHERE seq = (SELECT max(seq) FROM records)")
            db.execute("UPDATE records SET hash = 'x' WHERE seq = (SELECT max(seq) FROM records)")
        db.close()
        federation.wait_until(
            lambda _: any("nothing is signed any more" in one for one in problems_of(c)),
            DEADLINE_S,
        )
        assert metrics_of(c)["lightyear_audit_chain_valid"] == 0
        announced = durable_values(c)["manifest"]
        status = federation.status()[A]
        assert status is not None
        reached = int(status["round"]) + 3
        federation.wait_until(has_reached(A, reached), DEADLINE_S)  # type: ignore[arg-type]
        assert durable_values(c)["manifest"] == announced, "nothing new was signed"
        seen = federation.status()[A]
        assert seen is not None
        [view] = [peer for peer in seen["peers"] if peer["name"] == C]
        assert view["state"] == "reachable"
        assert "Traceback" not in c.log.read_text()
        federation.kill(C)
        federation.wait_for_exit(C)
        federation.start(C)
        assert federation.wait_for_exit(C) == 4
        assert "Traceback" not in c.log.read_text()
