"""Measures what a shadow adds to the worker's time in a round: training, judging and merging.

Two simulations of the same sites in one process, without and with a shadow; processor time, so that
other load on the machine changes little.  The goal: at most 2.1 times the time.

Prints one JSON object.

    python tests/bench/shadow.py
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace

import torch

from lightyear_node.config.federation import RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.simulate import simulate
from lightyear_node.lab.simulation_records import SimulationSpec
from lightyear_node.types import PeerName

GOAL = 2.1
REPETITIONS = 5
SPEC = SimulationSpec(
    sites=[PeerName(f"site-{letter}") for letter in "abcd"],
    rounds=3,
    seed=0,
    rule=RuleConfig(),
    task=TaskConfig(args={"epochs": 8}),
    final_only=True,
)


def seconds(spec: SimulationSpec) -> float:
    began = time.process_time()
    simulate(spec)
    return time.process_time() - began


def main() -> None:
    torch.set_num_threads(1)
    with_shadow = replace(SPEC, rule=RuleConfig(shadow=True))
    seconds(SPEC)  # loads everything once
    plain, doubled = [], []
    for _ in range(REPETITIONS):
        plain.append(seconds(SPEC))
        doubled.append(seconds(with_shadow))
    ratio = statistics.median(b / a for a, b in zip(plain, doubled, strict=True))
    print(
        json.dumps(
            {
                "bench": "shadow",
                "goal": GOAL,
                "goal_met": ratio <= GOAL,
                "ratio": round(ratio, 2),
                "seconds": {
                    "without": round(statistics.median(plain), 3),
                    "with": round(statistics.median(doubled), 3),
                },
            }
        )
    )


if __name__ == "__main__":
    main()
