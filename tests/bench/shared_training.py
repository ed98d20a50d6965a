"""Measures what simulations save by sharing equal training.  Prints one JSON object.

Digits, five sites: the rules local, fedavg, and lightyear without and with the guard, under no
malfunction and three others, with 1, 2 and 4 bad sites.  CPU seconds of one thread, alternating:

    trained     every simulation trains
    shared      they share a cache, which is empty at the beginning
    saved       share of the trainings that were found in the cache
    speedup     trained / shared
    storing     a simulation that finds nothing, divided by one without a cache (goal ≤ 1.1)

    python tests/bench/shared_training.py
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from lightyear_node.config.federation import RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.jobs import client_names, malfunctions_of
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.simulate import simulate
from lightyear_node.lab.simulation_records import SimulationSpec
from lightyear_node.lab.training_cache import CacheSettings

SITES = 5
BAD = (1, 2, 4)
KINDS = ("sfa", "random", "dynamic")
RULES = (RuleConfig(name="fedavg"), RuleConfig(guard=False), RuleConfig())
CACHE_BYTES = 1 << 32


def specs(rounds: int, epochs: int) -> Iterator[SimulationSpec]:
    names, task = client_names(SITES), TaskConfig(args={"epochs": epochs})
    alone = SimulationSpec(names, rounds, 0, RuleConfig(name="local"), task)
    yield alone
    for rule in RULES:
        yield replace(alone, rule=rule)
        for kind in KINDS:
            for bad in BAD:
                faulty = malfunctions_of(names, MalfunctionConfig(kind=kind), bad, 0)
                yield replace(alone, rule=rule, malfunctions=faulty)


def measure(spec: SimulationSpec, folder: Path | None) -> tuple[float, int, int]:
    """CPU seconds, trainings, and how many of them were found."""
    cache = None if folder is None else CacheSettings(str(folder), CACHE_BYTES, {}, {})
    begin = time.process_time()
    result = simulate(spec, cache=cache)
    return time.process_time() - begin, result.trainings, result.cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    grid = list(specs(options.rounds, options.epochs))
    measure(replace(grid[0], rounds=1), None)  # loads what is imported at first use
    with tempfile.TemporaryDirectory() as folder:
        pairs = [(measure(spec, None), measure(spec, Path(folder))) for spec in grid]
    trained, shared = (sum(times[0] for times in one) for one in zip(*pairs, strict=True))
    total, found = (sum(both[1][place] for both in pairs) for place in (1, 2))
    (plain, _, _), (first, _, _) = pairs[0]
    print(
        json.dumps(
            {
                "bench": "shared_training",
                "simulations": len(grid),
                "trained_s": round(trained, 2),
                "shared_s": round(shared, 2),
                "saved": round(found / total, 3),
                "speedup": round(trained / shared, 2),
                "storing": round(first / plain, 3),
                "goal_storing": 1.1,
            }
        )
    )


if __name__ == "__main__":
    main()
