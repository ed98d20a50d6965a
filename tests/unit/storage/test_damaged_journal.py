"""A start on a damaged journal exits with code 4, one sentence and a hint, or loses nothing.

Each case applies one seeded change to one of the journal's files: the database, its write-ahead
log, the log's index, the high-water mark.  The start is that of a real node: it locks the state
directory, verifies the journal and its signatures, restores round journal, manifests, witnesses and
tracking, writes the `start` record and creates the barrier.  Not included are the worker (its
report about the model is given), weights files and ports.  Some of the refused cases are also run
as `lightyear-node start` processes.

A start that is not refused must leave exactly what a start on the undamaged files leaves: the
damage was in bytes that are not read, such as free space or a tail that SQLite ignores.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lightyear_node.lab.federation import package_environment
from lightyear_node.node.home import Home, load_home
from tests.support.journal_damage import DB, LOG, Case, Content, damage, outcome, restored, started
from tests.support.journals import FEDERATION, NAMES, JournalSite, a_federation

FEW = [Case(seed, crashed) for seed in range(12) for crashed in (False, True)]
MANY = [Case(seed, crashed) for seed in range(12, 162) for crashed in (False, True)]
PROCESSES = 10


class Site:
    """A home, the files of its journal in two states, and the result of a start on each."""

    def __init__(self, home: Home, files: dict[bool, Path]) -> None:
        self.home = home
        self.state = home.directory / home.config.state_dir
        self.files = files
        self.undamaged: dict[bool, Content] = {}
        for crashed, folder in files.items():
            restored(folder, self.state)
            self.undamaged[crashed] = started(home)

    def refuses(self, case: Case) -> bool:
        """Whether the node refuses to start; if it does not, nothing must be different."""
        restored(self.files[case.crashed], self.state)
        what = f"{case}: {damage(self.state, case)}"
        found = outcome(lambda: started(self.home))
        if found is None:
            return True
        assert without_start(found) == without_start(self.undamaged[case.crashed]), what
        return False


def without_start(content: Content) -> Content:
    """Without the record of the start itself, which depends on the clock."""
    rows, memory, heads, newest = content
    assert rows[-1].kind == "start"
    assert newest == (rows[-1].seq, rows[-1].hash)
    return rows[:-1], memory, heads


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = a_federation(tmp_path_factory.mktemp("sites"))
    at = folder / NAMES[0]
    now = datetime.now(UTC)
    home = load_home(at, at / "peers.yaml", environment={}, flags={"http": {"listen": ""}}, now=now)
    assert home.federation.federation == FEDERATION
    files = {crashed: tmp_path_factory.mktemp("files") / "state" for crashed in (False, True)}
    shutil.copytree(at / "state", files[False])
    writer = JournalSite.__new__(JournalSite)
    writer.path, writer.identity, writer.name = at / "state" / DB, home.identity, home.us
    writer.open()
    for round in range(3, 9):
        writer.seal(round)
        writer.decide(round, [])
        writer.commit(round)
    shutil.copytree(at / "state", files[True])  # while it is open: nothing is folded in
    writer.close()
    assert (files[True] / LOG).stat().st_size > 0
    return Site(home, files)


def run(site: Site, cases: Sequence[Case]) -> list[Case]:
    """Those that a start refuses."""
    seen: Counter[bool] = Counter()
    refused = []
    for case in cases:
        no = site.refuses(case)
        seen[no] += 1
        if no:
            refused.append(case)
    # Some damage must be refused and some be harmless; otherwise this tests nothing.
    assert seen[True] > len(cases) // 3
    assert seen[False] > 0
    return refused


def test_damage_is_refused_or_harmless(site: Site) -> None:
    run(site, FEW)


@pytest.mark.slow
def test_any_damage_is_refused_or_harmless(site: Site) -> None:
    refused = run(site, MANY)
    for case in refused[:: len(refused) // PROCESSES]:
        refused_by_a_process(site, case)


def test_a_process_ends_with_code_4_and_one_sentence(site: Site) -> None:
    case = next(case for case in FEW if site.refuses(case))
    refused_by_a_process(site, case)


def refused_by_a_process(site: Site, case: Case) -> None:
    restored(site.files[case.crashed], site.state)
    what = damage(site.state, case)
    command = [
        sys.executable,
        "-m",
        "lightyear_node",
        "start",
        "--peers",
        "peers.yaml",
        "--http",
        "",
    ]
    ended = subprocess.run(
        command,
        cwd=site.home.directory,
        env={**os.environ, **package_environment()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 4, (what, ended.stderr)
    assert "Traceback" not in ended.stderr, what
    errors = [line for line in ended.stderr.splitlines() if "journal" in line]
    assert errors, (what, ended.stderr)


def test_an_operator_may_continue_without_the_lost_records(site: Site) -> None:
    """As the hint says; the node then asks its peers for its last update."""
    for lost in ([LOG], [DB], [DB, LOG]):
        restored(site.files[True], site.state)
        for name in lost:
            (site.state / name).unlink()
        assert outcome(lambda: started(site.home)) is None
        rows, memory, *_ = started(site.home, recovered=True)
        assert rows[-1].kind == "start"
        assert json.loads(memory["barrier"])["recovering"]
        started(site.home)


def test_an_undamaged_journal_starts_in_both_states(site: Site) -> None:
    for crashed in (False, True):
        rows, *_ = site.undamaged[crashed]
        assert rows[-1].kind == "start"
    assert len(site.undamaged[True][0]) > len(site.undamaged[False][0])
