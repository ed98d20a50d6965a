"""Measures the overhead of a simulated federation over plain training.  Prints one JSON object.

Digits, five sites, the same batches.  Alternating, in CPU seconds of one thread:

    plain       a training loop of the same network over the same batches, and an evaluation on the
                test set after the last epoch, without federation code
    local       `simulate` with the rule local: everything but judging and merging
    fedavg      with merging, without judging
    lightyear   with every peer judged on the validation set, and the guard

`overhead` is the time divided by that of plain (goal for local: ≤ 1.1).  Judging needs forward
passes that plain training does not, so `scoring` compares with those: judging eight peers with the
paper's FEMNIST network on 256 samples, divided by a forward pass of each model (goal ≤ 1.3).

    python tests/bench/experiment.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from lightyear_node.config.federation import RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.simulate import simulate
from lightyear_node.lab.simulation_records import SimulationSpec
from lightyear_node.lab.tasks.digits import SmallCNN, build
from lightyear_node.lab.tasks.networks import CHARACTERS, PaperCNN
from lightyear_node.learning import Candidate, Validation, exchanged, make_rule
from lightyear_node.learning.rules import RoundContext
from lightyear_node.types import PeerName, Round
from lightyear_node.worker.training import evaluate

SITES = 5
CPU = torch.device("cpu")


def plain(rounds: int, epochs: int) -> None:
    for index in range(SITES):
        task = build(index, SITES, epochs=epochs)
        torch.manual_seed(0)
        model = SmallCNN()
        optimizer = task.optimizer(model.parameters())
        model.train()
        for _ in range(rounds * epochs):
            for x, y in task.train_data:
                optimizer.zero_grad(set_to_none=True)
                task.loss(model(x), y).backward()
                optimizer.step()
        assert task.test_data is not None
        evaluate(task, model, task.test_data, CPU)


def federation(rule: str, rounds: int, epochs: int) -> None:
    names = [PeerName(f"site-{index}") for index in range(SITES)]
    task = TaskConfig(args={"epochs": epochs})
    simulate(SimulationSpec(names, rounds, 0, RuleConfig(name=rule), task, final_only=True))


def scoring(peers: int = 8, rows: int = 256) -> tuple[float, float]:
    """Seconds to judge so many peers, and for the same forward passes alone."""
    torch.manual_seed(1)
    model = PaperCNN()
    batches = [
        (torch.rand(64, 1, 28, 28), torch.randint(CHARACTERS, (64,))) for _ in range(rows // 64)
    ]
    own = Candidate(PeerName("own"), exchanged(model))
    others = [
        Candidate(PeerName(f"peer-{index}"), {n: t + 1e-3 for n, t in own.weights.items()})
        for index in range(peers)
    ]
    probe = Validation(model, batches)
    rule = make_rule("lightyear")

    def forward() -> None:
        model.eval()
        with torch.no_grad():
            for _ in range(peers + 1):
                for x, _ in batches:
                    model(x)

    return (
        seconds(lambda: rule.judge(own, others, probe, RoundContext(Round(0), start=own.weights))),
        seconds(forward),
    )


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Warm-up: loads what is imported at first use.
    plain(1, 1)
    federation("lightyear", 1, 1)
    scoring(peers=1)
    times_by_name: dict[str, list[float]] = {}
    for _ in range(options.repetitions):
        times_by_name.setdefault("plain", []).append(
            seconds(lambda: plain(options.rounds, options.epochs))
        )
        for rule in ("local", "fedavg", "lightyear"):
            work = seconds(lambda rule=rule: federation(rule, options.rounds, options.epochs))  # type: ignore[misc]
            times_by_name.setdefault(rule, []).append(work)
    scores = [scoring() for _ in range(options.repetitions)]
    epochs = SITES * options.rounds * options.epochs
    print(
        json.dumps(
            {
                "bench": "experiment",
                "client_epochs_per_second": {
                    name: round(epochs / statistics.median(times), 1)
                    for name, times in times_by_name.items()
                },
                "overhead": {
                    name: round(
                        statistics.median(
                            a / b for a, b in zip(times, times_by_name["plain"], strict=True)
                        ),
                        3,
                    )
                    for name, times in times_by_name.items()
                },
                "goal_local": 1.1,
                "scoring": round(statistics.median(a / b for a, b in scores), 3),
                "goal_scoring": 1.3,
            }
        )
    )


if __name__ == "__main__":
    main()
