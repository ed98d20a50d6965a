"""The log: both formats, no forged lines, every event documented."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightyear_node.node.worker_output import BURST_LINES, LINE_CHARS_MAX, OutputLines
from lightyear_node.observe import log
from lightyear_node.types import PeerName, Reason, Transfer
from tests.support.paths import ROOT
from tests.unit.observe.test_observer import B, observer

PACKAGE = ROOT / "lightyear_node"
LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
NOT_THE_DAEMON = ("lab", "v1", "tasks")
NASTY = "a\nb\r\x1b[2J\x7f\u202eevil\u2028\ud800\u200b é"


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
    logging.captureWarnings(False)


def test_json_lines_have_their_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logger = log.set_up("info", "json")
    about = {"event": "peer", "round": 3, "phase": "collecting", "peer": PeerName("site-b")}
    logger.warning("%s is gone", "site-b", extra=about)
    logger.info("plain", extra={"event": "start"})
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert {key: first[key] for key in about} == about
    assert (first["level"], first["message"]) == ("warning", "site-b is gone")
    assert first["time"].endswith("+00:00")
    assert second.keys() == {"time", "level", "event", "message"}


@pytest.mark.parametrize("format", ["human", "json"])
def test_control_characters_are_escaped(capsys: pytest.CaptureFixture[str], format: str) -> None:
    logger = log.set_up("info", format)
    logger.info("received %s", NASTY, extra={"event": "peer"})
    try:
        raise ValueError(NASTY)
    except ValueError:
        logger.exception("failed: %s", NASTY, extra={"event": "failed"})
    written = capsys.readouterr().err
    lines = written.removesuffix("\n").split("\n")
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    if format == "json":
        for line in lines:
            plain = json.loads(line)
            assert all(value.isprintable() for value in plain.values())
            assert "\\u202eevil" in plain["message"]
            plain["message"].encode()  # no lone surrogate is left


def test_lines_of_other_packages_are_included(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up("info", "json")
    logging.getLogger("asyncio").error("something was never awaited")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old\nnews", stacklevel=1)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["event"] for line in lines] == ["library", "library"]


def daemon_files() -> list[Path]:
    found = PACKAGE.rglob("*.py")
    return [path for path in found if path.relative_to(PACKAGE).parts[0] not in NOT_THE_DAEMON]


def calls() -> Iterator[tuple[Path, ast.Call]]:
    for path in daemon_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                yield path, node


def events_in_code() -> set[str]:
    found = set()
    for path in daemon_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    named = isinstance(key, ast.Constant) and key.value == "event"
                    if named and isinstance(value, ast.Constant):
                        found.add(str(value.value))
    for _, call in calls():
        assert isinstance(call.func, ast.Attribute)
        if call.func.attr != "write" or len(call.args) < 3:  # not `EventLog.write`
            continue
        event = call.args[1]
        if isinstance(event, ast.Constant):
            found.add(str(event.value))
    text = "".join(path.read_text() for path in (PACKAGE / "protocol").glob("*.py"))
    kinds = re.findall(r'Note\("(\w+)"(?: if \w+ else "(\w+)")?', text)
    return (found | {kind for pair in kinds for kind in pair if kind} | {log.LIBRARY}) - {"witness"}


def test_every_event_is_in_the_table() -> None:
    page = (PACKAGE.parent / "docs/logs.md").read_text()
    cells = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert documented == events_in_code()


def test_every_line_has_an_event() -> None:
    bare = []
    for path, call in calls():
        assert isinstance(call.func, ast.Attribute)
        owner = ast.unparse(call.func.value)
        if call.func.attr not in LEVELS or not re.fullmatch(r"(.*[._])?log(ger)?", owner):
            continue
        if not any(keyword.arg == "extra" for keyword in call.keywords):
            bare.append(f"{path.name}:{call.lineno}")
    assert bare == []


# Repetitions.


def test_a_repeatedly_failing_transfer_is_logged_once() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    for _ in range(5):
        watched.peers.transfer_failed(B, Reason.UNREACHABLE, "connection reset")
    assert len(stream.getvalue().splitlines()) == 1
    watched.peers.transferred(B, "received", Transfer(10, 5, 0.1))
    watched.peers.transfer_failed(B, Reason.UNREACHABLE, "connection reset")
    assert len(stream.getvalue().splitlines()) == 2


def test_alternating_refusals_are_logged_once_each() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    for _ in range(5):
        watched.peers.refused(B, Reason.SCHEMA_MISMATCH, "its tensors are others")
        watched.peers.refused(B, Reason.SCHEMA_MISMATCH, "it refuses us")
    assert len(stream.getvalue().splitlines()) == 2


def test_a_peer_that_refuses_us_is_not_logged_as_refused() -> None:
    stream = io.StringIO()
    watched = observer(stream)
    watched.peers.refused(B, Reason.IDENTITY, "refuses us: another node is running with our keys")
    watched.peers.refused(B, Reason.IDENTITY, "it sent a manifest in the name of 'site-c'")
    first, second = stream.getvalue().splitlines()
    assert first.endswith(f"{B} refuses us: another node is running with our keys")
    assert second.endswith(f"{B} is refused: it sent a manifest in the name of 'site-c'")


# Output of the task.


def test_lines_are_split_and_cut() -> None:
    lines = OutputLines()
    assert lines.feed(b"one\ntw", 0.0) == ["one"]
    assert lines.feed(b"o\r\rthree\xff\n\n", 0.0) == ["two", "three\\xff"]
    [long] = lines.feed(b"x" * 10_000, 0.0)
    assert len(long) <= LINE_CHARS_MAX + 2
    assert lines.feed(b"x" * 10_000, 0.0) == []
    assert lines.feed(b"xx\nnext\nlast", 0.0) == ["next"]
    assert lines.end(0.0) == ["last"]


def test_a_flood_of_output_is_limited_and_reported() -> None:
    lines = OutputLines()
    passed = [line for _ in range(1000) for line in lines.feed(b"again\n", 0.0)]
    assert len(passed) == BURST_LINES
    assert lines.feed(b"later\n", 100.0) == [f"({1000 - BURST_LINES} lines were left out)", "later"]
