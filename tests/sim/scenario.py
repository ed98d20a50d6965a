"""One seed: a phase with random faults, then a recovery phase without.

The fault phase checks safety only.  Then the network heals, some sites may stay down for good, and
all others must make progress together.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from lightyear_node.protocol.events import Blocked, Paused, Unquarantined
from lightyear_node.protocol.parameters import Parameters, Phase, admissible_min_peers
from lightyear_node.protocol.round_closing import CONFIRMING_HEARTBEATS
from lightyear_node.types import PeerName
from tests.sim.byzantine_site import BEHAVIOURS
from tests.sim.disk import Disk
from tests.sim.federation import Federation
from tests.sim.invariant_checker import InvariantBroken
from tests.sim.random_faults import inject_fault
from tests.sim.site import Site
from tests.sim.transcript import transcript
from tests.sim.world import Conditions, HistoryEntry

HEARTBEAT_S = 5.0
"""Some federations are slower by a common factor; these times are for factor 1."""
FAULT_PHASE_S = 1200.0
RECOVERY_PHASE_S = 500.0
"""Runs twice: once to settle, once to measure progress."""
ROUNDS_ENDLESS = 1_000_000
COMMITS_EXPECTED = 5
SKEW_MAX = 2
SLACK_S = 30.0
TRANSCRIPT_LINES = 40


@dataclass(frozen=True)
class Report:
    seed: int
    counts: Counter[str]
    simulated_s: float
    fingerprint: int


class SeedFailed(AssertionError):
    """Names the broken invariant, the last actions of the sites involved, and how to repeat it."""

    def __init__(
        self, seed: int, fault_s: float, world: Federation, broken: InvariantBroken
    ) -> None:
        conditions, parameters = world.conditions, world.conditions.parameters
        longer = f" --fault-seconds {fault_s:g}" if fault_s != FAULT_PHASE_S else ""
        super().__init__(
            f"seed {seed}: {broken}\n"
            f"  {len(parameters.peers)} sites, faulty_max {parameters.faulty_max}, min_peers"
            f" {parameters.min_peers}, echo {'on' if parameters.echo else 'off'},"
            f" rounds {parameters.rounds},"
            f" Byzantine {conditions.byzantine or 'none'}\n"
            f"  repeat with a transcript: python tests/sim/run.py --seeds {seed}{longer} --trace\n"
            f"{transcript(world.history, broken.sites, TRANSCRIPT_LINES)}"
        )
        self.seed = seed
        self.invariant = broken.invariant


def run(
    seed: int,
    trace: Callable[[HistoryEntry], None] | None = None,
    fault_s: float = FAULT_PHASE_S,
    recovery_s: float = RECOVERY_PHASE_S,
    new_disk: Callable[[], Disk] = Disk,
) -> Report:
    world = Federation(draw(seed), seed, new_disk)
    world.trace = trace
    start = world.now
    try:
        _fault_phase(world, fault_s)
        _recovery_phase(world, recovery_s)
    except InvariantBroken as broken:
        raise SeedFailed(seed, fault_s, world, broken) from broken
    counts = world.counts + world.checker.counts
    return Report(seed, counts, world.now - start, world.fingerprint)


def draw(seed: int) -> Conditions:
    """Draw the conditions; each seed disables some faults, so that the others interact more."""
    rng = random.Random(f"conditions {seed}")
    sites = rng.choice((2, 3, 3, 3, 4, 4, 4, 4, 5, 5, 6, 7, 8, 10))
    names = [PeerName(f"site-{letter}") for letter in "abcdefghij"[:sites]]
    changing = sites >= 3 and rng.random() < 0.25
    # If the number of members changes, the parameters must be valid before and after.
    fewest = sites - changing
    faulty_max = rng.randint(0, (fewest - 1) // 3)
    byzantine = rng.sample(names, rng.randint(0, faulty_max))
    admissible = [
        needed
        for needed in admissible_min_peers(fewest, faulty_max)
        if needed in admissible_min_peers(sites, faulty_max)
    ]
    pace = rng.choice((1.0, 1.0, 3.0, 10.0, 30.0))
    grace_s = rng.choice((5.0, 15.0, 30.0)) * pace
    parameters = Parameters(
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
    honest = [name for name in names if name not in byzantine]
    return Conditions(
        parameters=parameters,
        byzantine={name: rng.choice(BEHAVIOURS) for name in byzantine},
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


def _fault_phase(world: Federation, fault_s: float) -> None:
    conditions, pace = world.conditions, world.conditions.parameters.heartbeat_s / HEARTBEAT_S
    fault_s *= pace
    for site in world.sites.values():
        if site.name != conditions.latecomer:
            world.after(world.between((0.0, 10.0)), site.boot)
    for attacker in world.byzantine.values():
        world.after(world.between((0.0, 10.0)), attacker.act)
    end = world.now + fault_s
    _change_members(world, fault_s)

    def inject() -> None:
        if world.now < end:
            inject_fault(world)
            world.after(world.between((5.0, 90.0)) * pace, inject)

    world.after(world.between((5.0, 60.0)), inject)
    world.run_until(end)


def _change_members(world: Federation, fault_s: float) -> None:
    """One site joins or leaves; the others edit their peers.yaml at different times."""
    conditions = world.conditions
    joins, leaves = conditions.latecomer, conditions.leaver
    if joins is None and leaves is None:
        return
    leaves = None if joins is not None else leaves
    conditions.leaver = leaves
    change_at = world.between((0.2, 0.6)) * fault_s
    for site in world.sites.values():
        members = {peer for peer in site.others if peer != leaves}
        if site.name == leaves:
            continue  # it does not edit its own
        parameters = replace(site.parameters, peers=frozenset(members))
        world.after(change_at + world.between((0.0, 200.0)), _reconfigure(site, parameters))
    if joins is not None:
        world.after(change_at + world.between((0.0, 200.0)), world.sites[joins].boot)


def _reconfigure(site: Site, parameters: Parameters) -> Callable[[], None]:
    return lambda: site.reconfigure(parameters)


def _recovery_phase(world: Federation, recovery_s: float) -> None:
    world.cut = set()
    world.conditions = Conditions(
        parameters=world.conditions.parameters,
        byzantine=world.conditions.byzantine,
        train_s=world.conditions.train_s,
        rejected=world.conditions.rejected,
        tick_s=world.conditions.tick_s,
        leaver=world.conditions.leaver,
    )
    survivors = _remove_some(world)
    for site in survivors:
        site.resume()
        world.after(world.between((0.0, 60.0)), _restore_operation(site))
    pace = world.conditions.parameters.heartbeat_s / HEARTBEAT_S
    # Time for all to hear of every round that was signed twice, and to pardon it.
    for turn in range(10):
        world.run_until(world.now + recovery_s * pace / 10)
        if turn == 5:
            _restart_as_recovered(world, survivors)
        _pardon_honest_sites(world, survivors)
    before = {site.name: world.checker.commits_of(site.name) for site in survivors}
    for site in survivors:
        site.longest_wait_s = 0.0
    world.run_until(world.now + recovery_s * pace)
    if recovery_s >= RECOVERY_PHASE_S:
        _expect_progress(world, survivors, before)


def _restore_operation(site: Site) -> Callable[[], None]:
    def restore_operation() -> None:
        site.boot()
        site.handle(Blocked(frozenset()))
        site.handle(Paused(False))

    return restore_operation


def _pardon_honest_sites(world: Federation, sites: list[Site]) -> None:
    """Pardon sites that signed twice: operators know which disks came from a backup."""
    for site in sites:
        for peer in sorted(world.checker.signed_twice):
            site.handle(Unquarantined(peer))


def _restart_as_recovered(world: Federation, sites: list[Site]) -> None:
    """Start outdated sites with `--recovered`: no peer may hold the newer update any more."""
    for site in sites:
        if world.checker.has_an_older_disk(site.name):
            site.start_recovered()
            world.counts["started with --recovered"] += 1


def _remove_some(world: Federation) -> list[Site]:
    """Remove some sites for good; each of the others still has enough peers."""
    parameters, leaver = world.conditions.parameters, world.conditions.leaver
    needed = 1 + max(parameters.min_peers, parameters.faulty_max + 1)
    sites = [site for site in world.sites.values() if site.name != leaver]
    spare = max(0, len(sites) - needed)
    removed = world.random.sample(sites, world.random.randint(0, spare))
    for site in removed:
        site.remove_for_good()
    world.counts["sites lost for good"] += len(removed)
    return [site for site in sites if site not in removed]


def _expect_progress(world: Federation, sites: list[Site], before: dict[PeerName, int]) -> None:
    parameters, conditions = world.conditions.parameters, world.conditions
    # The slowest peer's training, the grace for missing peers, time to confirm what has
    # arrived, and the messages between.
    patience_s = max(parameters.grace_s, parameters.deadline_s)
    # Twice: a peer whose update is needed may still be confirming the previous round.
    patience_s += 2 * CONFIRMING_HEARTBEATS * parameters.heartbeat_s * parameters.echo
    limit_s = conditions.train_s * 1.2 + patience_s + conditions.fetch_s[1] + SLACK_S
    # A site that works, or claims to, may cost the others the whole deadline in every round.
    pace = parameters.heartbeat_s / HEARTBEAT_S
    expected = min(COMMITS_EXPECTED, int(RECOVERY_PHASE_S * pace / limit_s))
    for site in sites:
        if site.barrier is None:
            raise InvariantBroken("L2", f"{site.name} is not running", site.name)
        more = world.checker.commits_of(site.name) - before[site.name]
        if site.barrier.phase is not Phase.FINISHED and more < expected:
            waiting = site.barrier.waiting_for(world.now)
            raise InvariantBroken(
                "L2", f"{site.name} committed {more} rounds: {waiting}", site.name
            )
        if site.longest_wait_s > limit_s:
            text = f"{site.name} waited {site.longest_wait_s:.0f} s, more than {limit_s:.0f} s"
            raise InvariantBroken("L1", text, site.name)
    rounds = [site.barrier.round for site in sites if site.barrier]
    if max(rounds) - min(rounds) > SKEW_MAX:
        raise InvariantBroken("L3", f"the sites are in rounds {sorted(rounds)}")
