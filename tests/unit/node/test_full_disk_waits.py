"""A whole node whose disk is full at one step after another: its history is unaffected.

The node, its worker, its files and its journal are real; only the lack of space is made up.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.config.federation import RuleConfig
from lightyear_node.errors import DiskFull, StoreError
from lightyear_node.lab.federation import lay_out, site_names
from lightyear_node.node.construction import prepare
from lightyear_node.node.daemon import Node
from lightyear_node.node.heartbeat import Heartbeat
from lightyear_node.node.home import Home, load_home
from lightyear_node.node.worker_process import WorkerProcess
from lightyear_node.storage import disk_space
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.storage.hash_chain import Record
from lightyear_node.storage.journal import Journal
from tests.support.journal_records import first_bad_record, read_records

ROUNDS = 2
DEADLINE_S = 400.0
"""Generous: a slow machine makes these tests slow, not fail."""
STEPS = {
    **dict.fromkeys((f"record {kind}" for kind in ("start", "seal", "decision", "commit")), 3),
    **dict.fromkeys((f"file {folder}" for folder in ("models", "updates", "carry")), 1),
    **dict.fromkeys((f"job {job}" for job in ("initial", "train", "merge")), 1),
}
"""How many attempts fail before one succeeds."""


@dataclass
class Trouble:
    """The disk is full for the first few times that each step is tried."""

    struck: Counter[str] = field(default_factory=Counter)
    seen: list[tuple[int, int]] = field(default_factory=list)
    """Rounds while a record waits: the announced one and the durable one."""

    def strike(self, step: str) -> None:
        if self.struck[step] < STEPS.get(step, 0):
            self.struck[step] += 1
            raise DiskFull(f"{step}: No space left on device")

    def look(self, node: Node) -> None:
        assert node.rounds is not None
        durable = [record.round for record in read_records(node.parts.state.journal, "commit")]
        announced = node.rounds.own_state.current().round
        self.seen.append((announced, max(durable, default=-1) + 1))
        assert "No space left" in " ".join(node.parts.local_api.not_ready())


def home_in(folder: Path) -> Home:
    """A site that trains alone and so needs no peers."""
    [site, _] = lay_out(folder, site_names(2), rounds=ROUNDS, rule=RuleConfig(name="local"))
    return load_home(
        site.directory,
        site.directory / "peers.yaml",
        environment={},
        flags={"http": {"listen": ""}, "keep": {"models": 1}},
        now=datetime.now(UTC),
    )


def lived(folder: Path, started: Callable[[Node], None] = lambda node: None) -> list[Record]:
    """The records of all rounds, from start to end."""
    return lived_at(home_in(folder), started)


def lived_at(home: Home, started: Callable[[Node], None] = lambda node: None) -> list[Record]:
    async def run() -> None:
        parts = prepare(home, logging.getLogger("test"), exit_when_done=True)
        node = Node(parts, lambda: home)
        started(node)
        async with asyncio.timeout(DEADLINE_S):
            await node.run()

    asyncio.run(run())
    journal = Journal(home.directory / "state" / "journal.db")
    try:
        assert first_bad_record(journal) is None
        return read_records(journal)
    finally:
        journal.close()


def comparable(history: list[Record]) -> list[tuple[str, int, Any]]:
    """A history without the values that differ between runs."""
    found: list[tuple[str, int, Any]] = []
    for record in history:
        match record.kind:
            case "seal":
                about = record.body["update"]["digest"]
            case "decision":
                about = record.body["verdicts"]
            case "commit":
                about = record.body["model"]
            case _:
                about = record.body.get("rule")
        found.append((record.kind, record.round, about))
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> list[Record]:
    return lived(home)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "PAUSE_S", 0.01)
    monkeypatch.setattr(disk_space, "POLL_S", 0.001)


def strike_at(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, trouble: Callable[[Any], None]
) -> None:
    """Make a method fail as `trouble` decides from its first argument."""
    actual = getattr(kind, name)

    def struck(self: Any, *arguments: Any, **named: Any) -> Any:
        trouble(arguments[0])
        return actual(self, *arguments, **named)

    monkeypatch.setattr(kind, name, struck)


def test_a_step_without_disk_space_is_retried_before_the_next_step(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[Record],
    caplog: pytest.LogCaptureFixture,
) -> None:
    trouble = Trouble()
    strike_at(monkeypatch, Journal, "append", lambda kind: trouble.strike(f"record {kind}"))
    strike_at(
        monkeypatch, BlobStore, "adopt", lambda path: trouble.strike(f"file {path.parent.name}")
    )
    strike_at(monkeypatch, WorkerProcess, "call", lambda job: trouble.strike(f"job {job}"))
    talk = Heartbeat.keep_alive
    nodes: list[Node] = []

    def watched(heartbeat: Heartbeat) -> None:
        trouble.look(nodes[-1])
        talk(heartbeat)

    monkeypatch.setattr(Heartbeat, "keep_alive", watched)
    with caplog.at_level(logging.INFO, "test"):
        history = lived(tmp_path, nodes.append)
    assert {step: trouble.struck[step] for step in STEPS} == STEPS
    assert comparable(history) == comparable(undisturbed)
    # While a record waits, peers hear of no round that is not durable.
    assert trouble.seen
    assert all(announced <= durable for announced, durable in trouble.seen)
    words = [record.getMessage() for record in caplog.records]
    # Once for each that begins to wait, however often it is tried, and once when that is over.
    begun = sum("No space left on device" in text for text in words)
    assert begun == sum("there is room again" in text for text in words)
    assert 0 < begun < len(STEPS)


@pytest.mark.parametrize("where", ["fsync", "append"])
def test_a_broken_disk_ends_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """After a failed sync the state of the file is unknown: it is not retried."""
    tries: list[str] = []

    def broken(*arguments: Any, **_: Any) -> None:
        tries.append(str(arguments))
        if where == "fsync":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        raise StoreError("journal.db: disk I/O error")

    home = home_in(tmp_path)
    if where == "fsync":
        monkeypatch.setattr(os, "fsync", broken)
    else:
        monkeypatch.setattr(Journal, "append", broken)
    with pytest.raises(StoreError) as caught:
        lived_at(home)
    assert caught.value.exit_code == 4
    assert not isinstance(caught.value, DiskFull)
    assert len(tries) == 1


def test_only_the_newest_models_and_the_best_are_kept(
    home: Path, undisturbed: list[Record]
) -> None:
    state = home / site_names(2)[0] / "state"
    commits = [record.body for record in undisturbed if record.kind == "commit"]
    assert len(commits) == ROUNDS
    best = min(commits, key=lambda body: body["metrics"]["loss"])["model"]
    kept = {path.stem for path in (state / "models").iterdir()}
    assert kept == {commits[-1]["model"], best}
    assert len(list((state / "carry").iterdir())) == 1
    assert len(list((state / "updates").iterdir())) <= 2
