"""Exit codes of real processes, and errors as JSON."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
from pathlib import Path

import pytest

from lightyear_node.cli import EXIT_CODES
from lightyear_node.cli.common import Format, asked_format
from lightyear_node.errors import (
    AlreadyRunning,
    BarrierMisuse,
    ConfigError,
    LightyearError,
    StoreError,
    WorkerError,
)
from tests.support.journals import a_federation
from tests.support.terminal import COMMAND, DEADLINE_S, environment
from tests.unit.cli.test_commands import run


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_federation(tmp_path_factory.mktemp("sites"))


def test_every_error_has_a_documented_exit_code() -> None:
    errors = (LightyearError, ConfigError, AlreadyRunning, WorkerError, StoreError)
    assert {error.exit_code for error in errors} <= set(EXIT_CODES)
    assert BarrierMisuse.exit_code not in EXIT_CODES  # a bug, not part of the interface


def test_0_success(sites: Path) -> None:
    assert run("rounds", "list", cwd=sites / "site-a").returncode == 0


def test_1_failure(sites: Path, tmp_path: Path) -> None:
    journals = [sites / name / "state/journal.db" for name in ("site-a", "site-b")]
    texts = []
    for number, journal in enumerate(journals):
        out = tmp_path / f"{number}.jsonl"
        rounds = ("--to-round", "0") if number else ("--from-round", "2")
        ended = run("audit", "export", *rounds, "-o", str(out), cwd=journal.parents[1])
        assert ended.returncode == 0, ended.stderr
        texts.append(str(out))
    ended = run("audit", "compare", *texts, cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr


def test_2_usage(tmp_path: Path) -> None:
    for mistake in (["statu"], ["status", "--wach"], ["explain", "--round", "x"], ["init"]):
        assert run(*mistake, cwd=tmp_path).returncode == 2, mistake


def test_3_not_healthy_or_not_running(sites: Path) -> None:
    for question in ("status", "health", "pause"):
        assert run(question, cwd=sites / "site-a").returncode == 3


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_4_disk_full(sites: Path) -> None:
    ended = run("audit", "export", "-o", "/dev/full", cwd=sites / "site-a")
    assert ended.returncode == 4
    assert "No space left" in ended.stderr


def test_75_another_node_is_running(tmp_path: Path) -> None:
    lines = []
    for name, port in (("site-a", "7443"), ("site-b", "7444")):
        address = ("--address", f"127.0.0.1:{port}")
        assert run("init", name, "--name", name, *address, cwd=tmp_path).returncode == 0
        lines.append(run("id", "--home", name, cwd=tmp_path).stdout.strip())
    assert run("peers", "add", *lines, cwd=tmp_path).returncode == 0
    (tmp_path / "site-a/state").mkdir()
    with (tmp_path / "site-a/state/LOCK").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        ended = run("start", "--home", "site-a", "--peers", "peers.yaml", cwd=tmp_path)
    assert ended.returncode == 75, ended.stderr


def test_78_invalid_file(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("adress: h:1\n")
    assert run("status", cwd=tmp_path).returncode == 78


def test_130_interrupted(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text("address: h:1\n")
    for format in Format:
        watch = [*COMMAND, "status", "--watch", "--format", format]
        with subprocess.Popen(
            watch, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline()
                process.send_signal(signal.SIGINT)
                assert process.wait(DEADLINE_S) == 130
            finally:
                process.kill()


# Errors as JSON.


@pytest.mark.parametrize("format", ["json", "jsonl"])
@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["status"], 3, "no node is running"),
        (["rounds", "show", "99"], 78, "there is no round 99"),
        (["peers", "show", "site-bb"], 78, "no peer `site-bb`"),
        (["rounds", "show"], 2, "Missing argument"),
        (["status", "--wach"], 2, "No such option"),
        (["no-such-command"], 2, "No such command"),
    ],
)
def test_with_json_output_an_error_is_an_object(
    sites: Path, format: str, words: list[str], code: int, message: str
) -> None:
    ended = run(*words, "--format", format, cwd=sites / "site-a")
    assert ended.returncode == code
    [line] = ended.stdout.splitlines()
    shown = json.loads(line)
    assert (shown["schema_version"], shown["status"], shown["exit_code"]) == ("1", "error", code)
    assert message in shown["message"]
    assert shown["hint"]
    assert shown["message"] in ended.stderr
    assert "Traceback" not in ended.stderr


def test_without_a_format_standard_output_stays_empty(sites: Path) -> None:
    ended = run("status", cwd=sites / "site-a")
    assert ended.stdout == ""
    assert "no node is running" in ended.stderr


def test_the_format_is_found_anywhere_on_the_line() -> None:
    assert asked_format([]) is asked_format(["status"]) is Format.TABLE
    assert asked_format(["status", "--format", "json", "--nonsense"]) is Format.JSON
    assert asked_format(["--format=jsonl", "status"]) is Format.JSONL
    assert asked_format(["audit", "export", "--format", "csv"]) is Format.TABLE
    assert asked_format(["status", "--format"]) is Format.TABLE
