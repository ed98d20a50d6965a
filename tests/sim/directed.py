"""Schedules that chance rarely finds, played out by hand.

Each builds a small federation and makes one thing happen after the other; the referee watches as
always.  They pass as they are, and fail where the bug is planted that they are for.
"""

from __future__ import annotations

from collections.abc import Callable

from lightyear_node.barrier import Blocked, Pardoned, Phase, Terms
from lightyear_node.records import Digest, PeerName, Round, Update
from tests.sim.federation import Federation
from tests.sim.referee import InvariantBroken
from tests.sim.site import Site
from tests.sim.world import Conditions

A, B, C, D = (PeerName(f"site-{name}") for name in "abcd")


def federation(
    *names: PeerName,
    min_peers: int,
    faulty_max: int = 0,
    rounds: int = 1000,
    echo: bool = False,
    seed: int = 1,
    **conditions: object,
) -> Federation:
    terms = Terms(frozenset(names), min_peers, faulty_max, rounds, echo=echo)
    return Federation(Conditions(terms, **conditions), seed)  # type: ignore[arg-type]


def boot_all(world: Federation) -> list[Site]:
    sites = list(world.sites.values())
    for site in sites:
        site.boot()
    return sites


def cut_off(world: Federation, *names: PeerName) -> None:
    """From everybody, liars included; everything else is healed."""
    world.cut = {
        (one, other)
        for one in world.names
        for other in world.names
        if one != other and (one in names or other in names)
    }


def wait_until(
    world: Federation,
    condition: Callable[[], bool],
    within_s: float = 300.0,
    step_s: float = 0.5,
) -> None:
    end = world.now + within_s
    while not condition():
        if world.now >= end:
            waits = [site.barrier.waiting_for(end) for site in world.sites.values() if site.barrier]
            raise InvariantBroken("L2", f"the schedule does not go on: {'; '.join(waits)}")
        world.run_until(world.now + step_s)


def merged(world: Federation, site: PeerName, digest: Digest) -> bool:
    rounds = world.referee.merged_by(site).values()
    return any(update.digest == digest for updates in rounds for update in updates)


def merged_since(world: Federation, site: PeerName, peer: PeerName) -> bool:
    """Whether the newest rounds of a site have used anything of a peer."""
    rounds = list(world.referee.merged_by(site).values())
    return any(update.peer == peer for updates in rounds[-3:] for update in updates)


def two_faces_around_a_crash() -> None:
    two_faces()


def two_faces() -> Federation:
    """A liar shows one face to A and B, lets B crash, and shows another to B and C.

    With three witnesses needed of four, A merges the first.  If B has forgotten it, C merges the
    second; B is the honest site that both quorums share.
    """
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, echo=True, liars={D: "silent"})
    liar = world.liars[D]
    liar.serves = 1.0
    boot_all(world)
    world.run_until(world.now + 40)
    cut_off(world, C)
    faces = [liar.sign(Round(50), f"{D}/face {face}") for face in (0, 1)]

    def show(face: Update, *sites: PeerName) -> None:
        for site in sites:
            liar.say(site, face)
        world.run_until(world.now + 1)

    def both_know() -> bool:
        show(faces[0], A, B)
        return merged(world, A, faces[0].digest)

    wait_until(world, both_know)
    cut_off(world, A)
    world.sites[B].kill()
    world.sites[B].boot()
    for _ in range(60):
        show(faces[1], B, C)
    assert not merged(world, C, faces[1].digest)
    return world


def a_crash_while_recovering() -> None:
    """A site that has lost its disk crashes again before it has asked anybody.

    What it then finds is a state file, which must not pass for a memory.
    """
    world = federation(A, B, C, min_peers=1)
    [*_, site] = boot_all(world)
    world.run_until(world.now + 60)
    site.kill()
    site.lose_disk()
    cut_off(world, C)
    world.crash_at = (C, "after P0")
    site.boot()
    assert site.barrier is None
    world.run_until(world.now + 120)
    assert site.barrier is not None
    assert site.barrier.recovering
    world.cut = set()
    before = world.referee.commits_of(C)
    wait_until(world, lambda: world.referee.commits_of(C) > before + 2)


def a_note_between_sealing_and_announcing() -> None:
    """An operator blocks somebody in the moment in which an update is sealed; then a crash."""
    world = federation(A, B, C, min_peers=1)
    [site, *_] = boot_all(world)
    world.run_until(world.now + 30)
    wait_until(world, lambda: _phase(site) is Phase.SEALING, step_s=0.005)
    site.tell(Blocked(frozenset({C})))
    wait_until(world, lambda: _phase(site) is Phase.COLLECTING, step_s=0.005)
    site.kill()
    site.boot()
    before = world.referee.commits_of(A)
    wait_until(world, lambda: world.referee.commits_of(A) > before + 2)


def _announced_round(site: Site) -> int:
    return site.durable.announced.round if site.durable.announced else -1


def _phase(site: Site) -> Phase | None:
    return site.barrier.phase if site.barrier else None


def one_is_ahead_and_two_are_behind() -> None:
    """A, the slowest, completes a round with what B and C have sent it, and is cut off meanwhile.

    When it is back it is a round ahead.  B and C need two others each and have one, and A alone
    cannot pull them up: its later update has to count for their round.  D never starts.
    """
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, slowness={A: 3.0})
    for name in (A, B, C):
        world.sites[name].boot()
    site = world.sites[A]
    wait_until(world, lambda: world.referee.commits_of(A) >= 3)
    wait_until(world, lambda: _phase(site) is Phase.SEALING, step_s=0.005)
    before = site.durable.round
    assert {_phase(world.sites[name]) for name in (B, C)} == {Phase.COLLECTING}
    cut_off(world, A)
    wait_until(world, lambda: _announced_round(site) > before)
    world.cut = set()
    wait_until(world, lambda: world.referee.commits_of(B) > before + 2)


def two_on_probation() -> None:
    """Two sites need each other, and both are given back older disks, one after the other.

    Each tells the other what it has forgotten, and each is on probation with the other.
    """
    world = federation(A, B, min_peers=1)
    sites = boot_all(world)
    world.run_until(world.now + 60)
    for site in sites:
        site.back_up()
    world.run_until(world.now + 30)
    for site in sites:
        before = site.durable.generation
        site.kill()
        site.restore()
        site.boot()
        wait_until(world, lambda: site.durable.generation > before)  # noqa: B023
    done = [world.referee.commits_of(site.name) for site in sites]
    wait_until(world, lambda: world.referee.commits_of(A) > done[0] + 5)
    wait_until(world, lambda: world.referee.commits_of(B) > done[1] + 5)


def a_backup_that_others_know_better() -> None:
    """A disk is replaced by an older copy; the others still wait for what was signed after it."""
    world = federation(A, B, C, min_peers=2)
    [*_, site] = boot_all(world)
    world.run_until(world.now + 60)
    _forget_the_last_update(world, site)
    site.boot()
    before = world.referee.commits_of(C)
    wait_until(world, lambda: world.referee.commits_of(C) > before + 5)
    assert C not in world.referee.two_stories


def _forget_the_last_update(world: Federation, site: Site) -> None:
    """It is back where it was before that, but A has heard of it."""
    wait_until(world, lambda: _phase(site) is Phase.TRAINING)
    site.back_up()
    wait_until(world, lambda: _phase(site) is Phase.COLLECTING, step_s=0.05)
    last = site.durable.announced
    heard = world.sites[A]
    wait_until(world, lambda: last in heard.durable.vouched[site.name], step_s=0.05)
    site.kill()
    site.restore()


def a_backup_that_nobody_contradicts() -> None:
    """What no protocol can prevent: whoever knows better is away when the old copy goes on.

    C has told its last update to A alone, and is given back an older disk while A is away.  It
    signs that round a second time, for B.  When A comes back, both find C out: it stays away until
    their operators pardon it, and nothing else comes of it.
    """
    world = federation(A, B, C, min_peers=1)
    [*_, site] = boot_all(world)
    world.run_until(world.now + 60)
    world.cut = {pair for one in (A, C) for pair in ((one, B), (B, one))}
    _forget_the_last_update(world, site)
    cut_off(world, A)
    world.run_until(world.now + 5)  # until nothing of A's is on its way any more
    site.boot()
    wait_until(world, lambda: C in world.referee.two_stories)
    wait_until(world, lambda: site.durable.announced in world.sites[B].durable.vouched[C])
    world.cut = set()
    wait_until(world, lambda: all(C in world.sites[name].durable.quarantined for name in (A, B)))
    before = world.referee.commits_of(C)
    for _ in range(5):
        for name in (A, B):
            world.sites[name].tell(Pardoned(C))
        world.run_until(world.now + 20)
    assert not any(C in world.sites[name].durable.quarantined for name in (A, B))
    wait_until(world, lambda: world.referee.commits_of(C) > before + 5)
    assert merged_since(world, A, C)


def evidence_after_a_pardon() -> None:
    """A and B hold the same evidence.  A pardons, and B goes on telling A."""
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, liars={D: "silent"})
    liar = world.liars[D]
    boot_all(world)
    world.run_until(world.now + 40)
    for face in (0, 1):
        liar.say(A, liar.sign(Round(5), f"{D}/5/{face}"))
    wait_until(world, lambda: D in world.sites[B].durable.quarantined)
    world.sites[A].tell(Pardoned(D))
    world.run_until(world.now + 60)
    assert D not in world.sites[A].durable.quarantined


def one_witness_too_few() -> None:
    """A liar shows one face to A and B, and another to C, which nobody else can reach.

    C is slow, and so it has an update of B's already that counts for its round: with the liar's it
    has enough to close.  But who else has heard of what the liar showed it?
    """
    world = federation(
        A,
        B,
        C,
        D,
        min_peers=2,
        faulty_max=1,
        echo=True,
        liars={D: "silent"},
        slowness={C: 4.0},
    )
    liar = world.liars[D]
    liar.serves = 1.0
    boot_all(world)
    faces = [liar.sign(Round(500), f"{D}/face {face}") for face in (0, 1)]
    site = world.sites[C]
    wait_until(world, lambda: _has_early_update(site))
    world.cut = {pair for one in (A, B) for pair in ((one, C), (C, one))}
    before = world.referee.commits_of(C)
    for _ in range(120):
        for name, face in ((A, 0), (B, 0), (C, 1)):
            liar.say(name, faces[face])
        world.run_until(world.now + 1)
    assert merged(world, A, faces[0].digest)
    assert world.referee.commits_of(C) > before
    assert not merged(world, C, faces[1].digest)


def _has_early_update(site: Site) -> bool:
    """Whether it trains, and another site's update for that round is here."""
    held = site.disk.fetched.get(B)
    if site.barrier is None or held is None:
        return False
    return _phase(site) is Phase.TRAINING and 0 < site.barrier.round <= held.round


def a_restart_does_not_pardon() -> None:
    """B and C pardon a liar, A does not.  A restarts, and nobody tells it of the liar again."""
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, liars={D: "silent"})
    liar = world.liars[D]
    liar.serves = 1.0
    boot_all(world)
    world.run_until(world.now + 40)
    for face in (0, 1):
        liar.say(A, liar.sign(Round(5), f"{D}/5/{face}"))
    others = [world.sites[name] for name in (B, C)]
    wait_until(world, lambda: all(D in site.durable.quarantined for site in others))
    cut_off(world, A)
    for site in others:
        site.tell(Pardoned(D))
    world.sites[A].kill()
    world.run_until(world.now + 5)
    world.cut = set()
    world.sites[A].boot()
    good = liar.sign(Round(500), f"{D}/500")
    for _ in range(60):
        liar.say(A, good)
        world.run_until(world.now + 1)
    assert not merged(world, A, good.digest)


def a_second_offence_after_a_pardon() -> None:
    """A liar is pardoned at A and B.  C finds it out again, for a later round."""
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, liars={D: "silent"})
    liar = world.liars[D]
    boot_all(world)
    world.run_until(world.now + 40)
    world.cut = {pair for one in (A, B) for pair in ((one, C), (C, one))}

    def tell_two_stories(round: int, to: PeerName) -> None:
        for face in (0, 1):
            liar.say(to, liar.sign(Round(round), f"{D}/{round}/{face}"))

    def quarantined_by(*sites: PeerName) -> bool:
        return all(D in world.sites[site].durable.quarantined for site in sites)

    tell_two_stories(5, A)
    wait_until(world, lambda: quarantined_by(A, B))
    for name in (A, B):
        world.sites[name].tell(Pardoned(D))
    world.run_until(world.now + 20)
    assert not quarantined_by(A)
    assert not quarantined_by(B)
    tell_two_stories(9, C)
    wait_until(world, lambda: quarantined_by(C))
    world.cut = set()
    wait_until(world, lambda: quarantined_by(A, B))


def caught(schedule: Callable[[], None]) -> str | None:
    """The invariant that a schedule breaks."""
    try:
        schedule()
    except InvariantBroken as broken:
        return broken.invariant
    return None
