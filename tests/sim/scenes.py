"""Twelve scenes whose whole story is written down in `golden/`, for people to read.

Each is one small federation, one seed and what happens to it by hand.  The first line of a scene's
docstring is the title of its transcript.
"""

from __future__ import annotations

from collections.abc import Callable

from lightyear_node.barrier import Paused
from lightyear_node.records import Round
from tests.sim.directed import A, B, C, D, boot_all, cut_off, federation, two_faces
from tests.sim.federation import Federation

Scene = Callable[[], Federation]


def all_well() -> Federation:
    """Three sites, two rounds, and nothing happens."""
    world = federation(A, B, C, min_peers=1, rounds=2)
    boot_all(world)
    world.run_until(world.now + 60)
    return world


def straggler() -> Federation:
    """One of four trains six times longer: it is waited for, then not any more, and catches up."""
    world = federation(A, B, C, D, min_peers=2, rounds=4, slowness={D: 6.0})
    boot_all(world)
    world.run_until(world.now + 260)
    return world


def crash_after_seal() -> Federation:
    """A site crashes between sealing and announcing: the same update is announced after all."""
    world = federation(A, B, min_peers=1, rounds=2, restart_s=(5.0, 5.0))
    world.crash_at = (B, "after P1")
    boot_all(world)
    world.run_until(world.now + 70)
    return world


def crash_between_decision_and_commit() -> Federation:
    """A site crashes after it has decided: it carries out the same decision again."""
    world = federation(A, B, C, min_peers=2, rounds=2, restart_s=(5.0, 5.0))
    world.crash_at = (B, "after P2")
    boot_all(world)
    world.run_until(world.now + 70)
    return world


def partition_in_halves() -> Federation:
    """Two and two, and each needs two others: nobody goes on until they can talk again."""
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
    """A site that was cut off finds the others far ahead, and joins them there."""
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
    """A site is given back an older disk: the others show it what it has signed since."""
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
    """A liar tells two stories of one round: whoever hears both tells the others."""
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, rounds=3, liars={D: "silent"})
    liar = world.liars[D]
    boot_all(world)
    world.run_until(world.now + 12)
    for name, face in ((A, 0), (B, 1), (C, 0)):
        liar.say(name, liar.sign(Round(0), f"{D}/0/{face}"))
    world.run_until(world.now + 60)
    return world


def echo_quorum() -> Federation:
    """The same two faces in echo mode, and a crash between: only the first is ever merged."""
    return two_faces()


def pause_and_resume() -> Federation:
    """An operator pauses a site: it completes its round, and the others go on without it."""
    world = federation(A, B, C, min_peers=1, rounds=6)
    [*_, site] = boot_all(world)
    world.run_until(world.now + 22)
    site.tell(Paused(True))
    world.run_until(world.now + 40)
    site.tell(Paused(False))
    world.run_until(world.now + 60)
    return world


def late_joiner() -> Federation:
    """A fourth site starts when the others are far: it begins where they are."""
    world = federation(A, B, C, D, min_peers=2, rounds=7)
    for name in (A, B, C):
        world.sites[name].boot()
    world.run_until(world.now + 70)
    world.sites[D].boot()
    world.run_until(world.now + 80)
    return world


SCENES: list[Scene] = [
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
