"""Measures what a node adds to a training script: plain, Lightning, Hugging Face.

In one process, rounds under the node alternate with the same training without it.  A round's cost
has two parts: that of its beginning and end (files, state, metrics), which does not depend on its
length, and that of every step (counting progress), a ratio of processor times, which other load on
the machine changes little.  The goal: at most 5 % of a round of 10 seconds.

Prints one JSON object; `missed` lists the scripts that miss the goal.

    python tests/bench/training_scripts.py
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightyear_node.node.worker_process import WorkerProcess

ROUNDS = 9
ROUND_S = 10.0
GOAL = 0.05
ROOT = Path(__file__).parents[2]

PARTS = """
import copy, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
import lightyear_node.training as ly

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
                                 nn.Linear(512, 10))
    def forward(self, x, labels=None):
        logits = self.net(x)
        return logits if labels is None else (F.cross_entropy(logits, labels), logits)

class Watch:
    wall = cpu = 0.0
    def start(self, *_, **__):
        self.began = time.perf_counter(), time.process_time()
    def stop(self, *_, **__):
        self.wall = time.perf_counter() - self.began[0]
        self.cpu = time.process_time() - self.began[1]

def numbers(inside, bare, total):
    return {"inside": inside.wall, "inside_cpu": inside.cpu, "bare": bare.wall,
            "bare_cpu": bare.cpu, "bare_total": total}

x = torch.randn(4096, 256)
y = torch.arange(4096) % 10
train_set = TensorDataset(x, y)
train = DataLoader(train_set, 64, shuffle=True)
val = DataLoader(TensorDataset(x[:512], y[:512]), 64)
"""

SCRIPTS = {
    "script": """
model = Net()
ly.init(model, val_data=val, loss=F.cross_entropy)
optimizer = torch.optim.Adam(model.parameters())
ly.state(optimizer)

def epoch(watch):
    watch.start()
    for inputs, labels in train:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    watch.stop()

inside, bare = Watch(), Watch()
while ly.running():
    epoch(bare)
    ly.receive(model)
    epoch(inside)
    ly.send(model, metrics=numbers(inside, bare, bare.wall))
""",
    "lightning": """
import lightning as L

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, index):
        return F.cross_entropy(self(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

class Clock(Watch, L.Callback):
    on_train_start, on_train_end = Watch.start, Watch.stop

def trainer(clock):
    return L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False, callbacks=[clock])

module, clock, bare = Module(), Clock(), Clock()
unpatched = copy.deepcopy(module)
total = 0.0
# The trainer sends by itself, so the numbers travel as metrics of the model.
ly.init(module, val_data=val, loss=F.cross_entropy,
        metrics={name: lambda *_, name=name: numbers(clock, bare, total)[name]
                 for name in numbers(clock, bare, total)})
federated = trainer(clock)
ly.patch(federated)
while ly.running():
    began = time.perf_counter()
    trainer(bare).fit(unpatched, train)
    total = time.perf_counter() - began
    federated.fit(module, train)
""",
    "hugging_face": """
from transformers import Trainer, TrainerCallback, TrainingArguments

class Clock(Watch, TrainerCallback):
    on_train_begin, on_train_end = Watch.start, Watch.stop

data = [{"x": one, "labels": label} for one, label in train_set]
def trainer(model, clock):
    arguments = TrainingArguments("out", num_train_epochs=1, per_device_train_batch_size=64,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True)
    return Trainer(model=model, args=arguments, train_dataset=data, callbacks=[clock])

model, clock, bare = Net(), Clock(), Clock()
unpatched = trainer(copy.deepcopy(model), bare)
total = 0.0
ly.init(model, val_data=val, loss=F.cross_entropy,
        metrics={name: lambda *_, name=name: numbers(clock, bare, total)[name]
                 for name in numbers(clock, bare, total)})
federated = trainer(model, clock)
ly.patch(federated)
while ly.running():
    began = time.perf_counter()
    unpatched.train()
    total = time.perf_counter() - began
    federated.train()
""",
}


async def rounds_of(folder: Path, script: str) -> list[dict[str, float]]:
    """The times of each round but the first; `total` is what the daemon waited for."""
    (folder / "train.py").write_text(PARTS + script)
    opening: dict[str, Any] = {
        "script": str(folder / "train.py"),
        "args": [],
        "name": "site-a",
        "sites": ["site-a", "site-b"],
        "seed": 3,
        "rule": {"name": "lightyear"},
        "rounds": ROUNDS,
        "device": "cpu",
        "threads": 1,
        "exchange": {},
    }
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    worker = WorkerProcess(
        opening, silence_s=600.0, environment={"PYTHONPATH": path}, on_output=lambda line: None
    )
    found = []
    try:
        base = folder / "model"
        await worker.call("initial", out=str(base), wire_header=str(folder / "header"))
        carry = None
        for round in range(ROUNDS):
            files = {
                key: str(folder / f"{key}-{round}") for key in ("own", "outgoing", "carry_out")
            }
            began = time.perf_counter()
            answer = await worker.call("train", round=round, base=str(base), carry=carry, **files)
            found.append({"total": time.perf_counter() - began, **answer["metrics"]})
            base, carry = Path(files["own"]), files["carry_out"]
    finally:
        await worker.stop()
    return found[1:]


def fastest(rounds: Sequence[Mapping[str, float]], key: str) -> float:
    """The time of the fastest half of the rounds, which met the least other load."""
    return sum(sorted(one[key] for one in rounds)[: len(rounds) // 2])


def measured(script: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        rounds = asyncio.run(rounds_of(Path(folder), script))
    median = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    # `total` includes the bare training, which runs in the same job.
    ours = [one["total"] - one["bare_total"] - one["inside"] for one in rounds]
    theirs = [one["bare_total"] - one["bare"] for one in rounds]
    fixed = statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
    per_step = fastest(rounds, "inside_cpu") / fastest(rounds, "bare_cpu") - 1
    return {
        "round_s": round(median["inside"], 3),
        "fixed_s": round(fixed, 4),
        "per_step": round(per_step, 4),
        "overhead": round(max(fixed, 0.0) / ROUND_S + max(per_step, 0.0), 4),
    }


def main() -> None:
    needed = {"script": None, "lightning": "lightning", "hugging_face": "transformers"}
    here = {kind: name is None or importlib.util.find_spec(name) for kind, name in needed.items()}
    scripts = {kind: measured(script) for kind, script in SCRIPTS.items() if here[kind]}
    missed = [kind for kind, found in scripts.items() if found["overhead"] > GOAL]
    absent = [kind for kind in SCRIPTS if kind not in scripts]
    found = {"scripts": scripts, "missed": missed, "goal_met": not missed, "not_installed": absent}
    print(json.dumps({"bench": "scripts", "goal": GOAL, **found}))


if __name__ == "__main__":
    main()
