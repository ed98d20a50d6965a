"""A Lamport stamp that peers drove up under an earlier version returns to small numbers."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from lightyear_node.node.home import load_home
from lightyear_node.storage.journal import Journal
from tests.support.journal_damage import DB, started
from tests.support.journals import NAMES, a_federation


def test_an_excessive_stamp_is_corrected_by_the_next_record(tmp_path: Path) -> None:
    at = a_federation(tmp_path) / NAMES[0]
    home = load_home(
        at, at / "peers.yaml", environment={}, flags={"http": {"listen": ""}}, now=datetime.now(UTC)
    )
    journal = Journal(at / "state" / DB)
    journal.append("operator", {"command": "stop"}, wall_ns=1, lamport=2**61, round=2)
    journal.close()
    (*_, driven_up, start), *_ = started(home)
    assert driven_up.lamport == 2**61
    assert (start.kind, start.lamport) == ("start", start.seq)
