"""One seed, one story: a phase in which anything may go wrong, and one in which nothing does.

In the first, only safety is asked for.  Then everything heals, some sites may stay dead for good,
and all the others must be seen to make progress together.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from lightyear_node.barrier import Phase, Terms, admissible_min_peers
from lightyear_node.records import PeerName
from tests.sim.referee import InvariantBroken
from tests.sim.world import Conditions, Liar, Site, World

STORM_S = 1200.0
SETTLING_S = 400.0
CALM_S = 500.0
ROUNDS_ENDLESS = 1_000_000
COMMITS_EXPECTED = 5
SKEW_MAX = 2
SLACK_S = 30.0


@dataclass(frozen=True)
class Report:
    seed: int
    counts: Counter[str]
    simulated_s: float
    fingerprint: int


class SeedFailed(AssertionError):
    """Says what was broken, and how to see it again."""

    def __init__(self, seed: int, conditions: Conditions, broken: InvariantBroken) -> None:
        terms = conditions.terms
        super().__init__(
            f"seed {seed}: {broken}\n"
            f"  {len(terms.peers)} sites, faulty_max {terms.faulty_max}, min_peers"
            f" {terms.min_peers}, rounds {terms.rounds}, liars {conditions.liars or 'none'}\n"
            f"  again, with every event: python tests/sim/run.py --seeds {seed} --trace"
        )
        self.seed = seed
        self.invariant = broken.invariant


def run(seed: int, trace: Callable[[str], None] | None = None) -> Report:
    conditions = draw(seed)
    world = World(conditions, seed)
    world.trace = trace
    start = world.now
    try:
        _storm(world)
        _calm(world)
    except InvariantBroken as broken:
        raise SeedFailed(seed, conditions, broken) from broken
    counts = world.counts + world.referee.counts
    return Report(seed, counts, world.now - start, world.fingerprint)


def draw(seed: int) -> Conditions:
    """Each seed switches some faults off altogether, so that the others get room to interact."""
    rng = random.Random(f"conditions {seed}")
    sites = rng.choice((2, 3, 3, 4, 4, 5, 6, 7))
    faulty_max = rng.randint(0, (sites - 1) // 3)
    names = [PeerName(f"site-{index}") for index in range(sites)]
    liars = rng.sample(names, rng.randint(0, faulty_max))
    terms = Terms(
        peers=frozenset(names),
        min_peers=rng.choice(admissible_min_peers(sites, faulty_max)),
        faulty_max=faulty_max,
        rounds=rng.choice((ROUNDS_ENDLESS, ROUNDS_ENDLESS, 30)),
        grace_s=rng.choice((5.0, 15.0, 30.0)),
        deadline_s=random.Random(f"deadline {seed}").choice((0.0, 0.0, 0.0, 120.0)),
    )
    return Conditions(
        terms=terms,
        liars={name: rng.choice(Liar.HABITS) for name in liars},
        slowness={name: rng.choice((1.0, 1.0, 1.0, 2.0, 6.0)) for name in names},
        train_s=rng.choice((2.0, 8.0, 20.0)),
        delay_s=(0.01, rng.choice((0.3, 1.0, 4.0))),
        fetch_s=(0.5, rng.choice((2.0, 10.0, 40.0))),
        lost=rng.choice((0.0, 0.0, 0.05, 0.3)),
        duplicated=rng.choice((0.0, 0.2)),
        rejected=rng.choice((0.05, 0.5, 1.0)),
        crash_at_point=rng.choice((0.0, 0.005, 0.05)),
        crash_any_time=rng.choice((0.0, 0.0, 0.0005)),
    )


def _storm(world: World) -> None:
    for site in world.sites.values():
        world.after(world.between((0.0, 10.0)), site.boot)
    for liar in world.liars.values():
        world.after(world.between((0.0, 10.0)), liar.act)
    end = world.now + STORM_S

    def mischief() -> None:
        if world.now < end:
            _mischief(world)
            world.after(world.between((5.0, 90.0)), mischief)

    world.after(world.between((5.0, 60.0)), mischief)
    world.run_until(end)


def _mischief(world: World) -> None:
    rng, names = world.random, world.names
    site = rng.choice(list(world.sites.values()))
    pairs = [(one, other) for one in names for other in names if one != other]
    kinds = ("halves", "one way", "alone", "heal", "heal", "crash", "crash all", "pause", "wake")
    kind = rng.choice((*kinds, "block", "unblock"))
    world.counts[f"mischief: {kind}"] += 1
    match kind:
        case "halves":
            half = set(rng.sample(names, rng.randint(1, len(names) - 1)))
            world.cut = {(one, other) for one, other in pairs if (one in half) != (other in half)}
        case "one way":
            world.cut = {pair for pair in pairs if rng.random() < 0.3}
        case "alone":
            world.cut = {pair for pair in pairs if site.name in pair}
        case "heal":
            world.cut = set()
        case "crash":
            site.crash()
        case "crash all":
            for each in world.sites.values():
                each.crash()
        case "pause":
            site.pause()
        case "wake":
            for each in world.sites.values():
                each.resume()
        case "block":
            site.exclude(frozenset({rng.choice(site.others)}))
        case "unblock":
            site.exclude(frozenset())


def _calm(world: World) -> None:
    world.cut = set()
    world.conditions = Conditions(
        terms=world.conditions.terms,
        liars=world.conditions.liars,
        train_s=world.conditions.train_s,
        rejected=world.conditions.rejected,
    )
    survivors = _bury_some(world)
    for site in survivors:
        site.exclude(frozenset())
        site.resume()
    world.run_until(world.now + SETTLING_S)
    before = {site.name: world.referee.commits_of(site.name) for site in survivors}
    for site in survivors:
        site.longest_wait_s = 0.0
    world.run_until(world.now + CALM_S)
    _expect_progress(world, survivors, before)


def _bury_some(world: World) -> list[Site]:
    """Some sites never come back, but each of the others still has enough peers."""
    terms = world.conditions.terms
    needed = 1 + max(terms.min_peers, terms.faulty_max + 1)
    sites = list(world.sites.values())
    spare = max(0, len(sites) - needed)
    buried = world.random.sample(sites, world.random.randint(0, spare))
    for site in buried:
        site.bury()
    world.counts["sites lost for good"] += len(buried)
    return [site for site in sites if site not in buried]


def _expect_progress(world: World, sites: list[Site], before: dict[PeerName, int]) -> None:
    terms, conditions = world.conditions.terms, world.conditions
    for site in sites:
        if site.barrier is None:
            raise InvariantBroken("L2", f"{site.name} is not running")
        more = world.referee.commits_of(site.name) - before[site.name]
        if site.barrier.phase is not Phase.FINISHED and more < COMMITS_EXPECTED:
            words = site.barrier.waiting_for(world.now)
            raise InvariantBroken("L2", f"{site.name} committed {more} rounds: {words}")
        # The slowest peer's training, a grace for those that never come, and the messages between.
        patience_s = max(terms.grace_s, terms.deadline_s)
        limit_s = conditions.train_s * 1.2 + patience_s + conditions.fetch_s[1] + SLACK_S
        if site.longest_wait_s > limit_s:
            text = f"{site.name} waited {site.longest_wait_s:.0f} s, more than {limit_s:.0f} s"
            raise InvariantBroken("L1", text)
    rounds = [site.barrier.round for site in sites if site.barrier]
    if max(rounds) - min(rounds) > SKEW_MAX:
        raise InvariantBroken("L3", f"the sites are in rounds {sorted(rounds)}")
