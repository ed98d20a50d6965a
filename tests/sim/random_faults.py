"""Random faults of the network, processes and operators, one at a time."""

from __future__ import annotations

from lightyear_node.protocol.events import Blocked, Paused, Unquarantined
from tests.sim.federation import Federation

NETWORK = ("halves", "one way", "alone", "heal", "heal")
PROCESSES = ("crash", "crash", "crash all", "stop", "wake", "back up", "back up")
OPERATORS = ("pause", "go on", "go on", "block", "unblock", "pardon")


def inject_fault(world: Federation) -> None:
    rng, names = world.random, world.names
    site = rng.choice(list(world.sites.values()))
    pairs = [(one, other) for one in names for other in names if one != other]
    kind = rng.choice((*NETWORK, *PROCESSES, *OPERATORS))
    world.counts[f"fault: {kind}"] += 1
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
        case "stop":
            site.pause()
        case "wake":
            for each in world.sites.values():
                each.resume()
        case "back up":
            for each in world.sites.values():
                each.back_up()
        case "pause":
            site.handle(Paused(True))
        case "go on":
            for each in world.sites.values():
                each.handle(Paused(False))
        case "block":
            site.handle(Blocked(frozenset({rng.choice(site.others)})))
        case "unblock":
            for each in world.sites.values():
                each.handle(Blocked(frozenset()))
        case "pardon":
            site.handle(Unquarantined(rng.choice(site.others)))
