"""Lightning trainers in a worker: every `fit` is one round, and all state continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.script_worker import killed_and_undisturbed, run_alone, run_here

MODULE = """
import os, pathlib, signal, sys
from parts import *
import lightning as L
import lightyear_node.training as ly

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()
    def forward(self, x):
        return self.net(x)
    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self(x), y)
    def on_train_batch_start(self, batch, index):
        kill = sys.argv[1:] and self.trainer.current_epoch == 3 and index == 2
        if kill and not os.path.exists(sys.argv[1]):
            pathlib.Path(sys.argv[1]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    def on_train_epoch_end(self):
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        print("epoch", self.trainer.current_epoch, "step", self.trainer.global_step, "rate", rate)
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)]

class Watching(L.Callback):
    def on_fit_start(self, trainer, module):
        self.start = module.net[0].weight.detach().clone()
    def on_train_start(self, trainer, module):
        assert torch.equal(self.start, module.net[0].weight), "the received model came later"

def trainer(**changed):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False,
             "enable_checkpointing": False, "accelerator": "cpu"}
    return L.Trainer(**{**quiet, "max_epochs": 2, "precision": "bf16-mixed",
                        "accumulate_grad_batches": 2, "callbacks": [Watching()], **changed})
"""

LOOP = """
module, (train, val) = Module(), loaders()
ly.init(module, val_data=val, loss=F.cross_entropy)
trainer = trainer()
ly.patch(trainer)
while ly.running():
    trainer.fit(module, train)
"""


@pytest.mark.slow
def test_a_killed_round_is_trained_again_with_the_same_bytes(tmp_path: Path) -> None:
    """With bfloat16, accumulated gradients and a scheduler; the counters continue."""
    said: list[str] = []
    killed, undisturbed = killed_and_undisturbed(tmp_path, MODULE + LOOP, said.append)
    assert killed == undisturbed
    assert len({digest for digest, _ in killed}) == 3
    assert [answer["samples"] for _, answer in killed] == [80, 80, 80]
    epochs = [line for line in said if line.startswith("epoch")]
    assert epochs[-3:] == [
        "epoch 3 step 12 rate 0.005",
        "epoch 4 step 15 rate 0.005",
        "epoch 5 step 18 rate 0.0025",
    ]


def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> list[dict[str, Any]]:
    monkeypatch.chdir(tmp_path)
    return run_here(tmp_path, script, monkeypatch)


def test_callbacks_and_loggers_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script's callbacks see every round; its logger gets increasing steps."""
    logger = "logger=L.pytorch.loggers.CSVLogger('.'), log_every_n_steps=1"
    script = (MODULE + LOOP).replace("trainer = trainer()", f"trainer = trainer({logger})")
    script = script.replace("ly.patch", "before = list(trainer.callbacks)\nly.patch")
    script = script.replace(
        "        return F.cross_entropy(self(x), y)",
        "        loss = F.cross_entropy(self(x), y)\n"
        "        self.log('loss', loss)\n"
        "        return loss",
    )
    script += "    assert trainer.callbacks[1:] == before\n"
    assert all("ok" in one for one in answers(tmp_path, monkeypatch, script))
    [table] = (tmp_path / "lightning_logs").glob("version_0/metrics.csv")
    header, *rows = [line.split(",") for line in table.read_text().splitlines()]
    steps = [int(row[header.index("step")]) for row in rows]
    assert steps == sorted(set(steps))
    assert max(steps) >= 10


@pytest.mark.parametrize(
    ("replaced", "by", "words"),
    [
        (
            "        self.net = net()",
            "        self.net = net()\n        self.automatic_optimization = False",
            "Lightning: manual optimization is not supported by `patch`",
        ),
        ("ly.patch(trainer)", "ly.patch(trainer); ly.patch(trainer)", "`patch` was called twice"),
        ("ly.patch(trainer)", "ly.patch(module)", "`patch` got a Module, not a Lightning or"),
        (
            "trainer = trainer()",
            "trainer = trainer(devices=2)",
            "the trainer uses 2 processes; a node trains in one",
        ),
        ("    trainer.fit", "    ly.receive(module); trainer.fit", "`receive` was called twice"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: str, by: str, words: str
) -> None:
    script = (MODULE + LOOP).replace(replaced, by)
    failed = [one for one in answers(tmp_path, monkeypatch, script) if "error" in one]
    assert words in failed[0]["message"]
    assert failed[0]["hint"]


def test_a_patched_trainer_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fits = "\nassert trainer.current_epoch == 2\nprint('trained alone')"
    assert "trained alone" in run_alone(tmp_path, MODULE + LOOP + fits)
