"""A whole node whose disk is full at one step after the other: its history is as if it never was.

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

from lightyear_node import space
from lightyear_node.config.agreement import RuleTerms
from lightyear_node.driver import Driver
from lightyear_node.errors import DiskFull, StoreError
from lightyear_node.home import Home, load_home
from lightyear_node.journal import Journal, Record
from lightyear_node.lab.federation import lay_out, site_names
from lightyear_node.node import Node
from lightyear_node.store import Store
from lightyear_node.worker.handle import Worker

ROUNDS = 2
DEADLINE_S = 400.0
"""Generous: a slow machine makes these tests slow, not red."""
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
    """Rounds while a record waits: what peers would have been told, and what is durable."""

    def strike(self, step: str) -> None:
        if self.struck[step] < STEPS.get(step, 0):
            self.struck[step] += 1
            raise DiskFull(f"{step}: No space left on device")

    def look(self, driver: Driver) -> None:
        durable = [record.round for record in driver.errands.state.journal.records("commit")]
        self.seen.append((driver.saying().round, max(durable, default=-1) + 1))
        assert "No space left" in " ".join(driver.reporting.not_ready())


def home_in(folder: Path) -> Home:
    """A site that trains alone, and so needs nobody else to do its rounds."""
    [site, _] = lay_out(folder, site_names(2), rounds=ROUNDS, rule=RuleTerms(name="local"))
    return load_home(
        site.directory,
        site.directory / "peers.yaml",
        environment={},
        flags={"http": {"listen": ""}, "keep": {"models": 1}},
        now=datetime.now(UTC),
    )


def lived(folder: Path) -> list[Record]:
    """All rounds, from start to end."""
    return lived_at(home_in(folder))


def lived_at(home: Home) -> list[Record]:

    async def run() -> None:
        node = Node(home, logging.getLogger("test"), lambda: home, exit_when_done=True)
        async with asyncio.timeout(DEADLINE_S):
            await node.run()

    asyncio.run(run())
    journal = Journal(home.directory / "state" / "journal.db")
    try:
        assert journal.first_bad_record() is None
        return list(journal.records())
    finally:
        journal.close()


def told(history: list[Record]) -> list[tuple[str, int, Any]]:
    """A history without what is never the same twice."""
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
    monkeypatch.setattr(space, "PAUSE_S", 0.01)
    monkeypatch.setattr(space, "POLL_S", 0.001)


def strike_at(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, trouble: Callable[[Any], None]
) -> None:
    """Have a method fail as `trouble` says of its first argument."""
    actual = getattr(kind, name)

    def struck(self: Any, *arguments: Any, **named: Any) -> Any:
        trouble(arguments[0])
        return actual(self, *arguments, **named)

    monkeypatch.setattr(kind, name, struck)


def test_a_step_without_room_is_done_later_and_only_then_what_follows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[Record],
    caplog: pytest.LogCaptureFixture,
) -> None:
    trouble = Trouble()
    strike_at(monkeypatch, Journal, "append", lambda kind: trouble.strike(f"record {kind}"))
    strike_at(monkeypatch, Store, "adopt", lambda path: trouble.strike(f"file {path.parent.name}"))
    strike_at(monkeypatch, Worker, "call", lambda job: trouble.strike(f"job {job}"))
    talk = Driver._go_on_talking

    def watched(driver: Driver) -> None:
        trouble.look(driver)
        talk(driver)

    monkeypatch.setattr(Driver, "_go_on_talking", watched)
    with caplog.at_level(logging.INFO, "test"):
        history = lived(tmp_path)
    assert {step: trouble.struck[step] for step in STEPS} == STEPS
    assert told(history) == told(undisturbed)
    # While a record waits, peers hear of no round that is not durable.
    assert trouble.seen
    assert all(said <= durable for said, durable in trouble.seen)
    words = [record.getMessage() for record in caplog.records]
    # Once for each that begins to wait, however often it is tried, and once when that is over.
    begun = sum("No space left on device" in text for text in words)
    assert begun == sum("there is room again" in text for text in words)
    assert 0 < begun < len(STEPS)


@pytest.mark.parametrize("where", ["fsync", "append"])
def test_a_broken_disk_ends_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What a failed sync has lost nobody knows: it is not tried again."""
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


def test_only_the_last_models_and_the_best_are_left(home: Path, undisturbed: list[Record]) -> None:
    state = home / site_names(2)[0] / "state"
    commits = [record.body for record in undisturbed if record.kind == "commit"]
    assert len(commits) == ROUNDS
    best = min(commits, key=lambda body: body["metrics"]["loss"])["model"]
    kept = {path.stem for path in (state / "models").iterdir()}
    assert kept == {commits[-1]["model"], best}
    assert len(list((state / "carry").iterdir())) == 1
    assert len(list((state / "updates").iterdir())) <= 2
