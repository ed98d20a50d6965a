"""Directed schedules: event sequences that random faults rarely produce.

Each builds a small federation and scripts its events under the invariant checker.  A schedule
passes with the real code and fails with the planted bug that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable

from lightyear_node.protocol.events import Blocked, Unquarantined
from lightyear_node.protocol.parameters import Parameters, Phase
from lightyear_node.protocol.record_quota import PER_HOUR, STOCK
from lightyear_node.types import Digest, Evidence, PeerName, Round, Update
from tests.sim.federation import Federation
from tests.sim.invariant_checker import InvariantBroken
from tests.sim.site import Site
from tests.sim.world import Conditions

A, B, C, D = (PeerName(f"site-{name}") for name in "abcd")


def federation(
    *names: PeerName,
    min_peers: int,
    faulty_max: int = 0,
    rounds: int = 1000,
    echo: bool = False,
    deadline_s: float = 0.0,
    seed: int = 1,
    **conditions: object,
) -> Federation:
    parameters = Parameters(
        frozenset(names), min_peers, faulty_max, rounds, echo=echo, deadline_s=deadline_s
    )
    return Federation(Conditions(parameters, **conditions), seed)  # type: ignore[arg-type]


def boot_all(world: Federation) -> list[Site]:
    sites = list(world.sites.values())
    for site in sites:
        site.boot()
    return sites


def cut_off(world: Federation, *names: PeerName) -> None:
    """Isolate these sites from all others; heal every other link."""
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
            raise InvariantBroken("L2", f"the schedule makes no progress: {'; '.join(waits)}")
        world.run_until(world.now + step_s)


def merged(world: Federation, site: PeerName, digest: Digest) -> bool:
    rounds = world.checker.merged_by(site).values()
    return any(update.digest == digest for updates in rounds for update in updates)


def merged_since(world: Federation, site: PeerName, peer: PeerName) -> bool:
    """Tell whether the newest rounds of a site have merged updates of a peer."""
    rounds = list(world.checker.merged_by(site).values())
    return any(update.peer == peer for updates in rounds[-3:] for update in updates)


def equivocation_around_a_crash() -> None:
    equivocation()


def equivocation() -> Federation:
    """D sends one version to A and B, B crashes, and D sends another version to B and C.

    The echo quorum is three of four, so A merges the first version.  If B has lost it, C merges the
    second; B is the honest site that both quorums share.
    """
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, echo=True, byzantine={D: "silent"})
    attacker = world.byzantine[D]
    attacker.serves = 1.0
    boot_all(world)
    world.run_until(world.now + 40)
    cut_off(world, C)
    faces = [attacker.sign(Round(50), f"{D}/face {face}") for face in (0, 1)]

    def send(version: Update, *sites: PeerName) -> None:
        for site in sites:
            attacker.announce(site, version)
        world.run_until(world.now + 1)

    def a_has_merged() -> bool:
        send(faces[0], A, B)
        return merged(world, A, faces[0].digest)

    wait_until(world, a_has_merged)
    cut_off(world, A)
    world.sites[B].kill()
    world.sites[B].boot()
    for _ in range(60):
        send(faces[1], B, C)
    assert not merged(world, C, faces[1].digest)
    return world


def a_crash_while_recovering() -> None:
    """A site that has lost its disk crashes again before it has asked any peer.

    The state file that it then finds must not count as durable state.
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
    before = world.checker.commits_of(C)
    wait_until(world, lambda: world.checker.commits_of(C) > before + 2)


def a_note_between_sealing_and_announcing() -> None:
    """An operator blocks a peer while an update is being sealed; then the site crashes."""
    world = federation(A, B, C, min_peers=1)
    [site, *_] = boot_all(world)
    world.run_until(world.now + 30)
    wait_until(world, lambda: _phase(site) is Phase.SEALING, step_s=0.005)
    site.handle(Blocked(frozenset({C})))
    wait_until(world, lambda: _phase(site) is Phase.COLLECTING, step_s=0.005)
    site.kill()
    site.boot()
    before = world.checker.commits_of(A)
    wait_until(world, lambda: world.checker.commits_of(A) > before + 2)


def _announced_round(site: Site) -> int:
    return site.durable.announced.round if site.durable.announced else -1


def _phase(site: Site) -> Phase | None:
    return site.barrier.phase if site.barrier else None


def one_is_ahead_and_two_are_behind() -> None:
    """A, the slowest, completes a round with the updates of B and C while it is isolated.

    When it returns it is a round ahead.  B and C need two others each and have one, and A alone
    cannot advance them: its later update has to count for their round.  D never starts.
    """
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, slowness={A: 3.0})
    for name in (A, B, C):
        world.sites[name].boot()
    site = world.sites[A]
    wait_until(world, lambda: world.checker.commits_of(A) >= 3)
    wait_until(world, lambda: _phase(site) is Phase.SEALING, step_s=0.005)
    before = site.durable.round
    assert {_phase(world.sites[name]) for name in (B, C)} == {Phase.COLLECTING}
    cut_off(world, A)
    wait_until(world, lambda: _announced_round(site) > before)
    world.cut = set()
    wait_until(world, lambda: world.checker.commits_of(B) > before + 2)


def two_on_probation() -> None:
    """Two sites need each other, and both are restored from backups, one after the other.

    Each reports to the other what it has lost, and each is on probation with the other.
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
    done = [world.checker.commits_of(site.name) for site in sites]
    wait_until(world, lambda: world.checker.commits_of(A) > done[0] + 5)
    wait_until(world, lambda: world.checker.commits_of(B) > done[1] + 5)


def a_backup_older_than_others_know() -> None:
    """A disk is restored from a backup; the others know what was signed after it."""
    world = federation(A, B, C, min_peers=2)
    [*_, site] = boot_all(world)
    world.run_until(world.now + 60)
    _forget_the_last_update(world, site)
    site.boot()
    before = world.checker.commits_of(C)
    wait_until(world, lambda: world.checker.commits_of(C) > before + 5)
    assert C not in world.checker.signed_twice


def _forget_the_last_update(world: Federation, site: Site) -> None:
    """Restore the disk from before the last update, of which A has heard."""
    wait_until(world, lambda: _phase(site) is Phase.TRAINING)
    site.back_up()
    wait_until(world, lambda: _phase(site) is Phase.COLLECTING, step_s=0.05)
    last = site.durable.announced
    heard = world.sites[A]
    wait_until(world, lambda: last in heard.durable.vouched[site.name], step_s=0.05)
    site.kill()
    site.restore()


def a_backup_without_contradiction() -> None:
    """A case that no protocol can prevent: the only witness is away after a restore.

    C has sent its last update to A alone, and is restored from a backup while A is away.  It signs
    that round a second time, for B.  When A returns, both quarantine C until their operators pardon
    it; there is no other consequence.
    """
    world = federation(A, B, C, min_peers=1)
    [*_, site] = boot_all(world)
    world.run_until(world.now + 60)
    world.cut = {pair for one in (A, C) for pair in ((one, B), (B, one))}
    _forget_the_last_update(world, site)
    cut_off(world, A)
    world.run_until(world.now + 5)  # until no message of A is in flight
    site.boot()
    wait_until(world, lambda: C in world.checker.signed_twice)
    wait_until(world, lambda: site.durable.announced in world.sites[B].durable.vouched[C])
    world.cut = set()
    wait_until(world, lambda: all(C in world.sites[name].durable.quarantined for name in (A, B)))
    before = world.checker.commits_of(C)
    for _ in range(5):
        for name in (A, B):
            world.sites[name].handle(Unquarantined(C))
        world.run_until(world.now + 20)
    assert not any(C in world.sites[name].durable.quarantined for name in (A, B))
    wait_until(world, lambda: world.checker.commits_of(C) > before + 5)
    assert merged_since(world, A, C)


def evidence_after_a_pardon() -> None:
    """A and B hold the same evidence.  A pardons, and B keeps sending it to A."""
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, byzantine={D: "silent"})
    attacker = world.byzantine[D]
    boot_all(world)
    world.run_until(world.now + 40)
    for face in (0, 1):
        attacker.announce(A, attacker.sign(Round(5), f"{D}/5/{face}"))
    wait_until(world, lambda: D in world.sites[B].durable.quarantined)
    world.sites[A].handle(Unquarantined(D))
    world.run_until(world.now + 60)
    assert D not in world.sites[A].durable.quarantined


def one_witness_too_few() -> None:
    """D sends one version to A and B, and another to C, which only D can reach.

    C is slow and already has an update of B that counts for its round: with D's it has enough to
    close.  But no other site confirms the version that D sent to C.
    """
    world = federation(
        A,
        B,
        C,
        D,
        min_peers=2,
        faulty_max=1,
        echo=True,
        byzantine={D: "silent"},
        slowness={C: 4.0},
    )
    attacker = world.byzantine[D]
    attacker.serves = 1.0
    boot_all(world)
    faces = [attacker.sign(Round(500), f"{D}/face {face}") for face in (0, 1)]
    site = world.sites[C]
    wait_until(world, lambda: _has_early_update(site))
    world.cut = {pair for one in (A, B) for pair in ((one, C), (C, one))}
    before = world.checker.commits_of(C)
    for _ in range(120):
        for name, face in ((A, 0), (B, 0), (C, 1)):
            attacker.announce(name, faces[face])
        world.run_until(world.now + 1)
    assert merged(world, A, faces[0].digest)
    assert world.checker.commits_of(C) > before
    assert not merged(world, C, faces[1].digest)


def _has_early_update(site: Site) -> bool:
    """Tell whether the site is training and already holds another site's update of its round."""
    held = site.disk.fetched.get(B)
    if site.barrier is None or held is None:
        return False
    return _phase(site) is Phase.TRAINING and 0 < site.barrier.round <= held.round


def a_restart_does_not_pardon() -> None:
    """B and C pardon D, A does not.  A restarts, and no site sends it the evidence again."""
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, byzantine={D: "silent"})
    attacker = world.byzantine[D]
    attacker.serves = 1.0
    boot_all(world)
    world.run_until(world.now + 40)
    for face in (0, 1):
        attacker.announce(A, attacker.sign(Round(5), f"{D}/5/{face}"))
    others = [world.sites[name] for name in (B, C)]
    wait_until(world, lambda: all(D in site.durable.quarantined for site in others))
    cut_off(world, A)
    for site in others:
        site.handle(Unquarantined(D))
    world.sites[A].kill()
    world.run_until(world.now + 5)
    world.cut = set()
    world.sites[A].boot()
    good = attacker.sign(Round(500), f"{D}/500")
    for _ in range(60):
        attacker.announce(A, good)
        world.run_until(world.now + 1)
    assert not merged(world, A, good.digest)


def a_second_offence_after_a_pardon() -> None:
    """A and B pardon D.  C gets evidence of a second offence, in a later round."""
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, byzantine={D: "silent"})
    attacker = world.byzantine[D]
    boot_all(world)
    world.run_until(world.now + 40)
    world.cut = {pair for one in (A, B) for pair in ((one, C), (C, one))}

    def sign_twice(round: int, to: PeerName) -> None:
        for face in (0, 1):
            attacker.announce(to, attacker.sign(Round(round), f"{D}/{round}/{face}"))

    def quarantined_by(*sites: PeerName) -> bool:
        return all(D in world.sites[site].durable.quarantined for site in sites)

    sign_twice(5, A)
    wait_until(world, lambda: quarantined_by(A, B))
    for name in (A, B):
        world.sites[name].handle(Unquarantined(D))
    world.run_until(world.now + 20)
    assert not quarantined_by(A)
    assert not quarantined_by(B)
    sign_twice(9, C)
    wait_until(world, lambda: quarantined_by(C))
    world.cut = set()
    wait_until(world, lambda: quarantined_by(A, B))


def old_evidence() -> None:
    """D sends evidence against itself that is older than many of its updates."""
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, byzantine={D: "silent"})
    attacker = world.byzantine[D]
    boot_all(world)
    world.run_until(world.now + 40)
    pair = [attacker.sign(Round(3), f"{D}/3/{face}") for face in (0, 1)]
    for round in range(100, 120):
        attacker.announce(A, attacker.sign(Round(round), f"{D}/{round}"))
        world.run_until(world.now + 1)
    first, second = (world.manifests[update] for update in pair)
    attacker.announce(A, None, evidence=(Evidence(first, second),))
    wait_until(world, lambda: all(D in s.durable.quarantined for s in world.sites.values()))
    world.sites[A].kill()
    world.sites[A].boot()
    before = world.checker.commits_of(A)
    wait_until(world, lambda: world.checker.commits_of(A) > before + 3)
    assert D in world.sites[A].durable.quarantined


def small_jumps() -> None:
    """D raises the Lamport stamp of isolated A a little with every hello."""
    world = federation(A, B, C, D, min_peers=2, faulty_max=1, byzantine={D: "silent"})
    attacker = world.byzantine[D]
    boot_all(world)
    world.run_until(world.now + 40)
    cut_off(world, A)
    world.cut -= {(A, D), (D, A)}
    for step in range(1, 6):
        attacker.greet(A, lamport=step * 2**40)
        attacker.announce(A, None, lamport=step * 2**40)
        world.run_until(world.now + 1)
    world.cut = set()
    before = world.checker.commits_of(A)
    wait_until(world, lambda: world.checker.commits_of(A) > before + 5)
    assert merged_since(world, B, A)
    assert merged_since(world, C, A)


def bad_updates_before_every_deadline() -> None:
    """D delivers, just before every deadline, an update that all sites reject."""
    world = federation(
        A,
        B,
        C,
        D,
        min_peers=2,
        faulty_max=1,
        deadline_s=300.0,
        byzantine={D: "slow_bad_updates"},
    )
    boot_all(world)
    world.byzantine[D].act()
    world.run_until(world.now + 3000)
    commits = [world.checker.commits_of(name) for name in (A, B, C)]
    # A round of training and grace takes some 50 s; only the first may have cost a deadline.
    if min(commits) < 30:
        raise InvariantBroken("L1", f"bad updates have slowed all sites down to {commits} rounds")


def ever_later_rounds() -> None:
    """D announces a later round with every message, while the others train."""
    world = federation(
        A, B, C, D, min_peers=2, faulty_max=1, train_s=5000.0, byzantine={D: "silent"}
    )
    attacker = world.byzantine[D]
    boot_all(world)
    world.run_until(world.now + 10)
    before = world.checker.counts["notes: witness"]
    for round in range(600):
        for name in (A, B, C):
            attacker.announce(name, attacker.sign(Round(round), f"{D}/{round}"))
        world.run_until(world.now + 1)
    noted = world.checker.counts["notes: witness"] - before
    if noted > 3 * 2 * (STOCK + PER_HOUR * 600 / 3600):
        raise InvariantBroken("S8", f"one peer has caused {noted} records in ten minutes")


def caught(schedule: Callable[[], None]) -> str | None:
    """Return the invariant that a schedule breaks, if any."""
    try:
        schedule()
    except InvariantBroken as broken:
        return broken.invariant
    return None
