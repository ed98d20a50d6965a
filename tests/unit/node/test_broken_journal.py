"""A node whose journal is damaged while it runs reports it, and records and signs nothing more.

The node, its worker, its files and its journal are real.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from lightyear_node.audit.self_check import check_journal
from lightyear_node.node import daemon as node_module
from lightyear_node.node.construction import prepare
from lightyear_node.node.daemon import Node
from lightyear_node.node.heartbeat import Heartbeat
from tests.unit.node.test_full_disk_waits import DEADLINE_S, home_in

CHAIN_VALID = "lightyear_audit_chain_valid"
TURNS = 10
"""Turns of the halted event loop that the test waits for."""


def alter_record_2(path: Path) -> None:
    """Damage that only a check of all records detects."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("UPDATE records SET body = '{}' WHERE seq = 2")
    db.close()


def alter_end(path: Path) -> None:
    """Damage that the next append detects."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("UPDATE records SET hash = 'x' WHERE seq = (SELECT max(seq) FROM records)")
    db.close()


def move_away(path: Path) -> None:
    path.rename(path.with_name("away"))


@pytest.mark.parametrize(
    ("harm", "about"),
    [
        (alter_record_2, {"record 2 is not what was written"}),
        pytest.param(
            alter_end,
            {"is not what was written", "its newest record was changed while in use"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            move_away,
            # SQLite itself may be the first to find its files gone.
            {"is no longer in", "moved or replaced while in use", "cannot be read"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_journal_damaged_while_running_is_not_continued(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Path], None],
    about: set[str],
) -> None:
    monkeypatch.setattr(node_module, "JOURNAL_CHECK_S", 0.05)
    home = home_in(tmp_path)
    path = home.directory / "state" / "journal.db"
    talked = 0
    talk = Heartbeat.keep_alive

    def counted(heartbeat: Heartbeat) -> None:
        nonlocal talked
        talked += 1
        talk(heartbeat)

    monkeypatch.setattr(Heartbeat, "keep_alive", counted)
    node = Node(prepare(home, logging.getLogger("test")), lambda: home)

    async def break_it() -> None:
        journal = node.parts.state.journal
        while journal.length < 2:  # noqa: ASYNC110 - the node is run beside us
            await asyncio.sleep(0.01)
        harm(path)
        while not talked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert node.rounds is not None
        own_state = node.rounds.own_state
        length, announced = journal.length, own_state.current()
        while talked < TURNS:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        problems = node.parts.local_api.not_ready()
        assert any("nothing is signed any more" in one for one in problems), problems
        assert node.parts.observer.metrics.registry.get_sample_value(CHAIN_VALID) == 0
        assert journal.length == length
        assert own_state.current().latest == announced.latest
        answer = node.rounds.operator.routes()["pause"]({})
        assert "not recorded, and so not done" in answer["refused"]
        node.request_stop()

    async def run() -> None:
        async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
            group.create_task(break_it())
            await node.run()

    with caplog.at_level(logging.INFO, "test"):
        asyncio.run(run())
    errors = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    assert len(errors) == 1
    assert any(words in errors[0] for words in about)
    keys = [one.signing_key for one in home.certificates[home.us]]
    assert check_journal(path.parent, keys).damage is not None
