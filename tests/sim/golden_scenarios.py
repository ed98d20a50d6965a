"""Twelve scenarios whose transcripts are in `golden/`, for people to read.

Each is a small federation, a seed and scripted events.  The first line of a scenario's docstring is
the title of its transcript.
"""

from __future__ import annotations

from collections.abc import Callable

from lightyear_node.protocol.events import Paused
from lightyear_node.types import Round
from tests.sim.directed import A, B, C, D, boot_all, cut_off, equivocation, federation
from tests.sim.federation import Federation

GoldenScenario = Callable[[], Federation]


def all_well() -> Federation:
    """Three sites, two rounds, no faults."""
    world = federation(A, B, C, min_peers=1, rounds=2)
    boot_all(world)
    world.run_until(world.now + 60)
    return world


def straggler() -> Federation:
    """One of four trains six times longer: the others wait, then go on, and it catches up."""
    world = federation(A, B, C, D, min_peers=2, rounds=4, slowness={D: 6.0})
    boot_all(world)
    world.run_until(world.now + 260)
    return world


def crash_after_seal() -> Federation:
    """A site crashes between sealing and announcing: the restart announces the same update."""
    world = federation(A, B, min_peers=1, rounds=2, restart_s=(5.0, 5.0))
    world.crash_at = (B, "after P1")
    boot_all(world)
    world.run_until(world.now + 70)
    return world


def crash_between_decision_and_commit() -> Federation:
    """A site crashes after its decision: it executes the same decision again."""
    world = federation(A, B, C, min_peers=2, rounds=2, restart_s=(5.0, 5.0))
    world.crash_at = (B, "after P2")
    boot_all(world)
    world.run_until(world.now + 70)
    return world


def partition_in_halves() -> Federation:
    """A partition into two and two where each needs two others: all wait until it heals."""
    world = federation(A, B, C, D, min_peers=2, rounds=4)
    boot_all(world)
    world.run_until(world.now + 20)
    world.cut = {
        (one, other)
        for one in world.names
        for other in world.names
        if (one in (A, B)) != (other in (A, B))
    }
    world.run_until(world.now + 120)
    world.cut = set()
    world.run_until(world.now + 60)
    return world


def overtaken() -> Federation:
    """An isolated site finds the others far ahead and joins their round."""
    world = federation(A, B, C, min_peers=1, rounds=8)
    boot_all(world)
    world.run_until(world.now + 20)
    cut_off(world, C)
    world.run_until(world.now + 80)
    world.cut = set()
    world.run_until(world.now + 60)
    return world


def lost_disk() -> Federation:
    """A site loses its disk: it asks first, begins a new generation, and is on probation."""
    world = federation(A, B, C, min_peers=2, rounds=6)
    [*_, site] = boot_all(world)
    world.run_until(world.now + 35)
    site.kill()
    site.lose_disk()
    site.boot()
    world.run_until(world.now + 110)
    return world


def rolled_back_disk() -> Federation:
    """A site is restored from a backup: the others show it what it has signed since."""
    world = federation(A, B, C, min_peers=2, rounds=6)
    [*_, site] = boot_all(world)
    world.run_until(world.now + 22)
    site.back_up()
    world.run_until(world.now + 30)
    site.kill()
    site.restore()
    site.boot()
    world.run_until(world.now + 90)
    return world


def equivocator() -> Federation:
    """A Byzantine site signs two updates of one round: a site that sees both informs the others."""
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, rounds=3, byzantine={D: "silent"})
    attacker = world.byzantine[D]
    boot_all(world)
    world.run_until(world.now + 12)
    for name, face in ((A, 0), (B, 1), (C, 0)):
        attacker.announce(name, attacker.sign(Round(0), f"{D}/0/{face}"))
    world.run_until(world.now + 60)
    return world


def echo_quorum() -> Federation:
    """The same equivocation in echo mode, with a crash between: only the first update is merged."""
    return equivocation()


def pause_and_resume() -> Federation:
    """An operator pauses a site: it completes its round, and the others go on without it."""
    world = federation(A, B, C, min_peers=1, rounds=6)
    [*_, site] = boot_all(world)
    world.run_until(world.now + 22)
    site.handle(Paused(True))
    world.run_until(world.now + 40)
    site.handle(Paused(False))
    world.run_until(world.now + 60)
    return world


def late_joiner() -> Federation:
    """A fourth site starts late: it begins in the round of the others."""
    world = federation(A, B, C, D, min_peers=2, rounds=7)
    for name in (A, B, C):
        world.sites[name].boot()
    world.run_until(world.now + 70)
    world.sites[D].boot()
    world.run_until(world.now + 80)
    return world


SCENARIOS: list[GoldenScenario] = [
    all_well,
    straggler,
    crash_after_seal,
    crash_between_decision_and_commit,
    partition_in_halves,
    overtaken,
    lost_disk,
    rolled_back_disk,
    equivocator,
    echo_quorum,
    pause_and_resume,
    late_joiner,
]
