"""What a simulated federation costs besides training: `python tests/bench/experiment.py`.

Digits, five sites, the same batches.  In turn, in processor seconds of one thread:

    plain       a bare training loop of the same network over the same batches, and an evaluation
                of the test set at the end of the last epoch: no federation code at all
    local       `simulate` under the rule local: everything but judging and merging
    fedavg      with merging, nobody is judged on data
    lightyear   with every peer judged on the validation set, the guard on

`overhead` is the time over plain's (goal of local: ≤ 1.1).  Judging costs forward passes that plain
training does not have, so `scoring` compares it with those: judging eight peers with the paper's
FEMNIST network on 256 samples, over a bare forward pass of each model (goal ≤ 1.3).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from lightyear_node.config.agreement import RuleTerms
from lightyear_node.config.site import TaskEntry
from lightyear_node.lab.simulate import Spec, simulate
from lightyear_node.learning import Candidate, Probe, exchanged, make_rule
from lightyear_node.learning.rules import Turn
from lightyear_node.records import PeerName, Round
from lightyear_node.tasks.digits import SmallCNN, build
from lightyear_node.tasks.networks import CHARACTERS, PaperCNN
from lightyear_node.worker.train import evaluate

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
    task = TaskEntry(args={"epochs": epochs})
    simulate(Spec(names, rounds, 0, RuleTerms(name=rule), task, final_only=True))


def scoring(peers: int = 8, rows: int = 256) -> tuple[float, float]:
    """Judging that many peers, and the forward passes that it takes."""
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
    probe = Probe(model, batches)
    rule = make_rule("lightyear")

    def forward() -> None:
        model.eval()
        with torch.no_grad():
            for _ in range(peers + 1):
                for x, _ in batches:
                    model(x)

    return (
        seconds(lambda: rule.judge(own, others, probe, Turn(Round(0), start=own.weights))),
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
    given = parser.parse_args()
    torch.set_num_threads(1)
    # What is loaded at first use belongs to neither side.
    plain(1, 1)
    federation("lightyear", 1, 1)
    scoring(peers=1)
    taken: dict[str, list[float]] = {}
    for _ in range(given.repetitions):
        taken.setdefault("plain", []).append(seconds(lambda: plain(given.rounds, given.epochs)))
        for rule in ("local", "fedavg", "lightyear"):
            work = seconds(lambda rule=rule: federation(rule, given.rounds, given.epochs))  # type: ignore[misc]
            taken.setdefault(rule, []).append(work)
    scores = [scoring() for _ in range(given.repetitions)]
    epochs = SITES * given.rounds * given.epochs
    print(
        json.dumps(
            {
                "bench": "experiment",
                "client_epochs_per_second": {
                    name: round(epochs / statistics.median(times), 1)
                    for name, times in taken.items()
                },
                "overhead": {
                    name: round(
                        statistics.median(
                            a / b for a, b in zip(times, taken["plain"], strict=True)
                        ),
                        3,
                    )
                    for name, times in taken.items()
                },
                "goal_local": 1.1,
                "scoring": round(statistics.median(a / b for a, b in scores), 3),
                "goal_scoring": 1.3,
            }
        )
    )


if __name__ == "__main__":
    main()
