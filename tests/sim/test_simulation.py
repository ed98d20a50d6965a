"""Simulated federations of real barriers under random faults, and directed schedules."""

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
HARDEST = (2, 6, 8)
"""First seeds of the pairs that take longest."""


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=pytest.mark.slow) if n in HARDEST else n for n in SEEDS[::2]],
)
def test_invariants_hold_under_random_faults_and_all_sites_recover(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in (first, first + 1):
        counts += run(seed).counts
    # There were faults: without them this would show nothing.
    assert counts["crashes"] > 0
    assert counts["commits"] > 100


def test_invariants_hold_on_real_journals(tmp_path: Path) -> None:
    numbers, disks = count(), []

    def path() -> Path:
        return tmp_path / f"journal-{next(numbers)}.sqlite"

    def new_disk() -> Disk:
        disks.append(JournalDisk(path(), path))
        return disks[-1]

    counts: Counter[str] = Counter()
    for seed in islice(filter(_loses_disks, count()), 8):
        counts += run(seed, recovery_s=60.0, new_disk=new_disk).counts
        if counts["lost disks"] and counts["disks rolled back"] and counts["records"] > 1000:
            break
    else:
        pytest.fail(f"too few faults in these seeds: {counts}")
    written = [disk for disk in disks if disk.read() is not None]
    assert written
    assert [disk.first_bad_record() for disk in written] == [None] * len(written)


def _loses_disks(seed: int) -> bool:
    """Select seeds that lose and roll back disks, with few sites."""
    conditions = draw(seed)
    loses = conditions.lost_disk > 0 and conditions.rolled_back > 0
    return loses and len(conditions.parameters.peers) <= 5


@pytest.mark.parametrize(
    "schedule",
    [
        directed.equivocation_around_a_crash,
        directed.one_witness_too_few,
        directed.a_crash_while_recovering,
        directed.a_note_between_sealing_and_announcing,
        directed.one_is_ahead_and_two_are_behind,
        directed.two_on_probation,
        directed.a_backup_older_than_others_know,
        directed.a_backup_without_contradiction,
        directed.a_restart_does_not_pardon,
        directed.evidence_after_a_pardon,
        directed.a_second_offence_after_a_pardon,
        directed.old_evidence,
        directed.small_jumps,
        directed.bad_updates_before_every_deadline,
        directed.ever_later_rounds,
    ],
)
def test_a_directed_schedule_keeps_the_invariants(schedule: Callable[[], None]) -> None:
    schedule()


def test_a_seed_determines_the_history_for_any_hash_order() -> None:
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
