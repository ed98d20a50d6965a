"""One seed, one story: a phase in which anything may go wrong, and one in which nothing does.

In the first, only safety is asked for.  Then everything heals, some sites may stay dead for good,
and all the others must be seen to make progress together.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightyear_node.barrier import (
    Blocked,
    Pardoned,
    Paused,
    Phase,
    Terms,
    admissible_min_peers,
)
from lightyear_node.barrier.closing import CONFIRMING_HEARTBEATS
from lightyear_node.records import PeerName
from tests.sim.disk import Disk
from tests.sim.federation import Federation
from tests.sim.liar import HABITS
from tests.sim.mischief import befall
from tests.sim.referee import InvariantBroken
from tests.sim.site import Site
from tests.sim.story import tell
from tests.sim.world import Conditions, Told

HEARTBEAT_S = 5.0
"""Some federations take everything slower, by the same factor: these times are for the others."""
STORM_S = 1200.0
CALM_S = 500.0
"""To settle, and once more to show that everybody goes on."""
ROUNDS_ENDLESS = 1_000_000
COMMITS_EXPECTED = 5
SKEW_MAX = 2
SLACK_S = 30.0
TOLD_LINES = 40


@dataclass(frozen=True)
class Report:
    seed: int
    counts: Counter[str]
    simulated_s: float
    fingerprint: int


class SeedFailed(AssertionError):
    """Says what was broken, what the sites concerned did before, and how to see it again."""

    def __init__(
        self, seed: int, storm_s: float, world: Federation, broken: InvariantBroken
    ) -> None:
        conditions, terms = world.conditions, world.conditions.terms
        longer = f" --storm {storm_s:g}" if storm_s != STORM_S else ""
        super().__init__(
            f"seed {seed}: {broken}\n"
            f"  {len(terms.peers)} sites, faulty_max {terms.faulty_max}, min_peers"
            f" {terms.min_peers}, echo {'on' if terms.echo else 'off'}, rounds {terms.rounds},"
            f" liars {conditions.liars or 'none'}\n"
            f"  again, with every event: python tests/sim/run.py --seeds {seed}{longer} --trace\n"
            f"{tell(world.history, broken.sites, TOLD_LINES)}"
        )
        self.seed = seed
        self.invariant = broken.invariant


def run(
    seed: int,
    trace: Callable[[Told], None] | None = None,
    storm_s: float = STORM_S,
    calm_s: float = CALM_S,
    new_disk: Callable[[], Disk] = Disk,
) -> Report:
    world = Federation(draw(seed), seed, new_disk)
    world.trace = trace
    start = world.now
    try:
        _storm(world, storm_s)
        _calm(world, calm_s)
    except InvariantBroken as broken:
        raise SeedFailed(seed, storm_s, world, broken) from broken
    counts = world.counts + world.referee.counts
    return Report(seed, counts, world.now - start, world.fingerprint)


def draw(seed: int) -> Conditions:
    """Each seed switches some faults off altogether, so that the others get room to interact."""
    rng = random.Random(f"conditions {seed}")
    sites = rng.choice((2, 3, 3, 3, 4, 4, 4, 4, 5, 5, 6, 7, 8, 10))
    names = [PeerName(f"site-{letter}") for letter in "abcdefghij"[:sites]]
    changing = sites >= 3 and rng.random() < 0.25
    # Where the number of members changes, the terms must be right before and after.
    fewest = sites - changing
    faulty_max = rng.randint(0, (fewest - 1) // 3)
    liars = rng.sample(names, rng.randint(0, faulty_max))
    admissible = [
        needed
        for needed in admissible_min_peers(fewest, faulty_max)
        if needed in admissible_min_peers(sites, faulty_max)
    ]
    pace = rng.choice((1.0, 1.0, 3.0, 10.0, 30.0))
    grace_s = rng.choice((5.0, 15.0, 30.0)) * pace
    terms = Terms(
        peers=frozenset(names),
        min_peers=rng.choice(admissible),
        faulty_max=faulty_max,
        rounds=rng.choice((ROUNDS_ENDLESS, ROUNDS_ENDLESS, 30)),
        grace_s=grace_s,
        grace_min_s=rng.choice((grace_s, 2.0)),
        deadline_s=rng.choice((0.0, 0.0, 120.0)) * pace,
        heartbeat_s=HEARTBEAT_S * pace,
        suspect_s=20.0 * pace,
        observe_s=5.0 * pace,
        echo=sites >= 4 and rng.random() < 0.5,
    )
    honest = [name for name in names if name not in liars]
    return Conditions(
        terms=terms,
        liars={name: rng.choice(HABITS) for name in liars},
        slowness={name: rng.choice((1.0, 1.0, 1.0, 2.0, 6.0)) for name in names},
        train_s=rng.choice((2.0, 8.0, 20.0)) * pace,
        delay_s=(0.01, rng.choice((0.3, 1.0, 4.0))),
        fetch_s=(0.5, rng.choice((2.0, 10.0, 40.0))),
        restart_s=(1.0, 40.0 * pace),
        tick_s=rng.choice((0.5, 1.0, 2.0)) * pace,
        clock=rng.choice(("good", "good", "good", "equal", "back")),
        lost=rng.choice((0.0, 0.0, 0.05, 0.3)),
        duplicated=rng.choice((0.0, 0.2)),
        unanswered=rng.choice((0.0, 0.8, 1.0)),
        rejected=rng.choice((0.0, 0.05, 0.5, 1.0)),
        crash_at_point=rng.choice((0.0, 0.002, 0.02)),
        crash_any_time=rng.choice((0.0, 0.0, 0.0005)),
        lost_disk=rng.choice((0.0, 0.0, 0.2)),
        rolled_back=rng.choice((0.0, 0.0, 0.2)),
        latecomer=rng.choice(honest) if changing and rng.random() < 0.5 else None,
        leaver=rng.choice(honest) if changing else None,
    )


def _storm(world: Federation, storm_s: float) -> None:
    conditions, pace = world.conditions, world.conditions.terms.heartbeat_s / HEARTBEAT_S
    storm_s *= pace
    for site in world.sites.values():
        if site.name != conditions.latecomer:
            world.after(world.between((0.0, 10.0)), site.boot)
    for liar in world.liars.values():
        world.after(world.between((0.0, 10.0)), liar.act)
    end = world.now + storm_s
    _change_members(world, storm_s)

    def mischief() -> None:
        if world.now < end:
            befall(world)
            world.after(world.between((5.0, 90.0)) * pace, mischief)

    world.after(world.between((5.0, 60.0)), mischief)
    world.run_until(end)


def _change_members(world: Federation, storm_s: float) -> None:
    """One site joins or leaves, and everybody edits their peers.yaml when they come to it."""
    conditions = world.conditions
    joins, leaves = conditions.latecomer, conditions.leaver
    if joins is None and leaves is None:
        return
    leaves = None if joins is not None else leaves
    conditions.leaver = leaves
    change_at = world.between((0.2, 0.6)) * storm_s
    for site in world.sites.values():
        members = {peer for peer in site.others if peer != leaves}
        if site.name == leaves:
            continue  # it is not asked
        terms = replace(site.terms, peers=frozenset(members))
        world.after(change_at + world.between((0.0, 200.0)), _reform(site, terms))
    if joins is not None:
        world.after(change_at + world.between((0.0, 200.0)), world.sites[joins].boot)


def _reform(site: Site, terms: Terms) -> Callable[[], None]:
    return lambda: site.reform(terms)


def _calm(world: Federation, calm_s: float) -> None:
    world.cut = set()
    world.conditions = Conditions(
        terms=world.conditions.terms,
        liars=world.conditions.liars,
        train_s=world.conditions.train_s,
        rejected=world.conditions.rejected,
        tick_s=world.conditions.tick_s,
        unanswered=world.conditions.unanswered,
        leaver=world.conditions.leaver,
    )
    survivors = _bury_some(world)
    for site in survivors:
        site.resume()
        world.after(world.between((0.0, 60.0)), _set_right(site))
    pace = world.conditions.terms.heartbeat_s / HEARTBEAT_S
    # Time for everybody to be told of every round that was signed twice, and to forgive it.
    for turn in range(10):
        world.run_until(world.now + calm_s * pace / 10)
        if turn == 5:
            _own_up(world, survivors)
        _pardon_the_unlucky(world, survivors)
    before = {site.name: world.referee.commits_of(site.name) for site in survivors}
    for site in survivors:
        site.longest_wait_s = 0.0
    world.run_until(world.now + calm_s * pace)
    if calm_s >= CALM_S:
        _expect_progress(world, survivors, before)


def _set_right(site: Site) -> Callable[[], None]:
    def set_right() -> None:
        site.boot()
        site.tell(Blocked(frozenset()))
        site.tell(Paused(False))

    return set_right


def _pardon_the_unlucky(world: Federation, sites: list[Site]) -> None:
    """Operators know when a disk was restored from a backup."""
    for site in sites:
        for peer in sorted(world.referee.two_stories):
            site.tell(Pardoned(peer))


def _own_up(world: Federation, sites: list[Site]) -> None:
    """What nobody vouches for any more, nobody can remind a site of: so its operator does."""
    for site in sites:
        if world.referee.has_an_older_disk(site.name):
            site.start_recovered()
            world.counts["started with --recovered"] += 1


def _bury_some(world: Federation) -> list[Site]:
    """Some sites never come back, but each of the others still has enough peers."""
    terms, leaver = world.conditions.terms, world.conditions.leaver
    needed = 1 + max(terms.min_peers, terms.faulty_max + 1)
    sites = [site for site in world.sites.values() if site.name != leaver]
    spare = max(0, len(sites) - needed)
    buried = world.random.sample(sites, world.random.randint(0, spare))
    for site in buried:
        site.bury()
    world.counts["sites lost for good"] += len(buried)
    return [site for site in sites if site not in buried]


def _expect_progress(world: Federation, sites: list[Site], before: dict[PeerName, int]) -> None:
    terms, conditions = world.conditions.terms, world.conditions
    # The slowest peer's training, a grace for those that never come, time to confirm what is
    # here, and the messages between.
    patience_s = max(terms.grace_s, terms.deadline_s)
    patience_s += CONFIRMING_HEARTBEATS * terms.heartbeat_s * terms.echo
    limit_s = conditions.train_s * 1.2 + patience_s + conditions.fetch_s[1] + SLACK_S
    # A site that is at work, or says so, may cost the others the whole deadline in every round.
    pace = terms.heartbeat_s / HEARTBEAT_S
    expected = min(COMMITS_EXPECTED, int(CALM_S * pace / limit_s))
    for site in sites:
        if site.barrier is None:
            raise InvariantBroken("L2", f"{site.name} is not running", site.name)
        more = world.referee.commits_of(site.name) - before[site.name]
        if site.barrier.phase is not Phase.FINISHED and more < expected:
            words = site.barrier.waiting_for(world.now)
            raise InvariantBroken("L2", f"{site.name} committed {more} rounds: {words}", site.name)
        if site.longest_wait_s > limit_s:
            text = f"{site.name} waited {site.longest_wait_s:.0f} s, more than {limit_s:.0f} s"
            raise InvariantBroken("L1", text, site.name)
    rounds = [site.barrier.round for site in sites if site.barrier]
    if max(rounds) - min(rounds) > SKEW_MAX:
        raise InvariantBroken("L3", f"the sites are in rounds {sorted(rounds)}")
