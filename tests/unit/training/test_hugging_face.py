"""A `transformers.Trainer` in a worker: every `train` is one round, and all state continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.script_worker import killed_and_undisturbed, run_alone, run_here

PARTS = """
import os, pathlib, signal, sys
from parts import *
from transformers import Trainer, TrainerCallback, TrainingArguments
import lightyear_node.training as ly

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()
    def forward(self, x, labels=None):
        logits = self.net(x)
        return logits if labels is None else (F.cross_entropy(logits, labels), logits)

rounds = 0

class Watching(TrainerCallback):
    def on_train_begin(self, args, state, control, optimizer=None, **given):
        print("rate", round(optimizer.param_groups[0]["lr"], 6), flush=True)
    def on_step_end(self, args, state, control, optimizer=None, **given):
        steps = next(iter(optimizer.state.values()))["step"]
        if sys.argv[1:] and steps == 8 and not os.path.exists(sys.argv[1]):
            pathlib.Path(sys.argv[1]).touch()
            os.kill(os.getpid(), signal.SIGKILL)

model, (train, val) = Classifier(), loaders()
data = [{"x": x, "labels": y} for x, y in train.dataset]
arguments = TrainingArguments(
    "out", num_train_epochs=1, per_device_train_batch_size=16, learning_rate=0.01, report_to=[],
    save_strategy="no", logging_strategy="no", disable_tqdm=True, use_cpu=True)
"""

LOOP = """
ly.init(model, val_data=val, loss=F.cross_entropy)
trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Watching()])
ly.patch(trainer)
while ly.running():
    trainer.train()
"""


@pytest.mark.slow
def test_a_killed_round_is_trained_again_with_the_same_bytes(tmp_path: Path) -> None:
    """Adam's moments continue, and the linear schedule spans the federation's 8 rounds."""
    said: list[str] = []
    killed, undisturbed = killed_and_undisturbed(tmp_path, PARTS + LOOP, said.append)
    assert killed == undisturbed
    assert len({digest for digest, _ in killed}) == 3
    assert [answer["samples"] for _, answer in killed] == [80, 80, 80]
    rates = [line for line in said if line.startswith("rate")]
    steps = [0, 5, 10, 0, 5, 5, 10]  # without and with the killed round
    assert rates == [f"rate {round(0.01 * (1 - done / 40), 6)}" for done in steps]


@pytest.mark.parametrize(
    ("replaced", "by", "words"),
    [
        ("model=model, ", "model_init=Classifier, ", "a trainer with `model_init` builds its"),
        ("ly.patch(trainer)", "ly.patch(trainer); ly.patch(trainer)", "`patch` was called twice"),
    ],
)
def test_what_is_not_supported_is_refused_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: str, by: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    script = (PARTS + LOOP).replace(replaced, by)
    failed = [one for one in run_here(tmp_path, script, monkeypatch) if "error" in one]
    assert words in failed[0]["message"]
    assert failed[0]["hint"]


def test_a_patched_trainer_runs_alone(tmp_path: Path) -> None:
    assert "trained alone" in run_alone(tmp_path, PARTS + LOOP + "\nprint('trained alone')")
