"""Whole federations of real barriers in a storm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path

import pytest

from tests.sim import directed
from tests.sim.disk import Disk, JournalDisk
from tests.sim.scenario import draw, run

SEEDS = range(20)


@pytest.mark.parametrize("first", SEEDS[::5])
def test_a_storm_breaks_nothing_and_then_everybody_goes_on(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + 5):
        counts += run(seed).counts
    # The storm was one: without faults nothing would have been shown.
    assert counts["crashes"] > 0
    assert counts["commits"] > 100


def test_a_storm_breaks_nothing_on_real_journals(tmp_path: Path) -> None:
    numbers, disks = count(), []

    def path() -> Path:
        return tmp_path / f"journal-{next(numbers)}.sqlite"

    def new_disk() -> Disk:
        disks.append(JournalDisk(path(), path))
        return disks[-1]

    counts: Counter[str] = Counter()
    for seed in islice(filter(_is_forgetful, count()), 3):
        counts += run(seed, calm_s=60.0, new_disk=new_disk).counts
    assert counts["lost disks"]
    assert counts["disks rolled back"]
    assert counts["records"] > 1000
    written = [disk for disk in disks if disk.read() is not None]
    assert written
    assert [disk.first_bad_record() for disk in written] == [None] * len(written)


def _is_forgetful(seed: int) -> bool:
    """Disks are lost and rolled back in it, of few enough sites to be quick."""
    conditions = draw(seed)
    forgets = conditions.lost_disk > 0 and conditions.rolled_back > 0
    return forgets and len(conditions.terms.peers) <= 5


@pytest.mark.parametrize(
    "schedule",
    [
        directed.two_faces_around_a_crash,
        directed.one_witness_too_few,
        directed.a_crash_while_recovering,
        directed.a_note_between_sealing_and_announcing,
        directed.one_is_ahead_and_two_are_behind,
        directed.two_on_probation,
        directed.a_backup_that_others_know_better,
        directed.a_backup_that_nobody_contradicts,
        directed.a_restart_does_not_pardon,
        directed.evidence_after_a_pardon,
        directed.a_second_offence_after_a_pardon,
    ],
)
def test_a_directed_schedule(schedule: Callable[[], None]) -> None:
    schedule()


def test_a_seed_is_one_history_whatever_the_hash_order() -> None:
    def histories(hash_seed: str) -> str:
        command = [sys.executable, str(Path(__file__).with_name("run.py"))]
        return subprocess.run(
            [*command, "--seeds", "2000:2002", "--fingerprint"],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert histories("1") == histories("2")
