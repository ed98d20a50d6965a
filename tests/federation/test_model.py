"""Outputs of running nodes: models, scores, tables, and logs without secrets."""

from __future__ import annotations

import base64
import csv
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from lightyear_node.lab.federation import START, Federation, SiteHome, package_environment
from lightyear_node.lab.tasks import digits
from lightyear_node.worker.training import evaluate
from tests.support.site_queries import DEADLINE_S, SEED, A, B, LayOut, all_finished

ROUNDS = 2
PATIENT = "patient-4711-miller.dcm"
TASK = f"""
import pathlib
import torch
from lightyear_node.lab.tasks import digits

class Images(torch.utils.data.Dataset):
    def __init__(self, images): self.images, self.reads = images, 0
    def __len__(self): return len(self.images)
    def __getitem__(self, index):
        self.reads += 1
        if self.reads == 40 and not pathlib.Path("failed").exists():
            pathlib.Path("failed").touch()  # once only: the next worker goes on
            raise OSError(2, "No such file or directory", "/data/{PATIENT}")
        return self.images[index]

def build(site_index: int, site_count: int, seed: int, fail: bool = False):
    print("the task of site number", site_index)
    task = digits.build(site_index, site_count, seed, epochs=1)
    if fail:
        images = Images(task.train_data.dataset)
        task.train_data = torch.utils.data.DataLoader(images, 16, shuffle=True)
    return task
"""


def run(home: SiteHome, *words: str, code: int = 0) -> Any:
    ended = subprocess.run(
        [sys.executable, "-m", "lightyear_node", *words, "--format", "json"],
        cwd=home.directory,
        env=package_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return json.loads(ended.stdout)["data"]


def test_models_and_scores_are_exported_from_running_nodes(
    lay_out_sites: LayOut, tmp_path: Path
) -> None:
    homes = lay_out_sites(rounds=ROUNDS)
    out = tmp_path / "model.safetensors"
    with Federation(homes) as federation:
        federation.wait_until(all_finished, DEADLINE_S)
        data = run(homes[0], "model", "export", "--round", "last", "-o", str(out))
        last = federation.rounds(A)[-1]
        [verdict] = [one for one in last["verdicts"] if one["peer"] == B]
        update = homes[0].state_dir / "updates" / str(verdict["digest"])
        code = 0 if verdict["accepted"] else 3
        scored = run(homes[0], "score", str(update), code=code)
        assert all_finished(federation.status())
    assert (data["round"], data["digest"]) == (last["round"], last["model"])
    # The same code on the same files in the same kind of process: identical bits.
    for key in ("peer", "accepted", "reason", "score", "weight", "digest"):
        assert scored[key] == verdict[key], key
    assert {check["name"]: check["value"] for check in scored["guard"]} == {
        name: verdict["checks"][name] for name in ("distance", "agreement", "regret")
    }
    assert run(homes[0], "model", "list")[-1]["names"][-1] == "last"  # and after it has exited
    network = digits.SmallCNN()
    network.load_state_dict(load_file(out))
    task = digits.build(0, len(homes), SEED)
    assert task.test_data is not None
    measured = evaluate(task, network, task.test_data, torch.device("cpu"))
    # One thread there, several here: the last bits of the loss may differ.
    assert measured == pytest.approx(last["merged"], rel=1e-5)
    lines = (homes[0].state_dir / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["model"] for line in lines][-1] == last["model"]
    with (homes[0].state_dir / "rounds.csv").open(newline="") as file:
        assert [row["round"] for row in csv.DictReader(file)] == [str(n) for n in range(ROUNDS)]


@pytest.mark.parametrize("format", ["human", "json"])
def test_logs_contain_no_weights_keys_sample_scores_or_patients(
    lay_out_sites: LayOut, format: str
) -> None:
    homes = lay_out_sites(rounds=ROUNDS)
    for home in homes:
        (home.directory / "hospital.py").write_text(TASK)
        path = home.directory / "node.yaml"
        settings = yaml.safe_load(path.read_text())
        fails = home.name == A
        settings["task"] = {"entry": "hospital:build", "args": {"fail": fails}}
        path.write_text(yaml.safe_dump(settings))
    command = [*START, "--log-level", "debug", "--log-format", format]
    with Federation(homes, command) as federation:
        federation.wait_until(all_finished, DEADLINE_S)
    logs = {home.name: home.log.read_text() for home in homes}
    everything = "".join(logs.values())
    assert "FileNotFoundError" in logs[A]
    assert "hospital.py:" in logs[A]
    assert PATIENT not in everything
    assert "task: the task of site number 0" in logs[A]
    for secret in [*secrets_of(homes), *weights_of(homes[0])]:
        assert secret not in everything, secret[:20]
    assert "Traceback" not in everything
    for text in logs.values():
        assert all(line.isprintable() for line in text.splitlines())
        assert max(map(len, text.splitlines())) < 2000
    if format == "json":
        lines = [json.loads(line) for line in everything.splitlines()]
        assert all({"time", "level", "event", "message"} <= line.keys() for line in lines)
        assert {"start", "listening", "trained", "closed", "merged", "worker", "task_output"} <= {
            line["event"] for line in lines
        }


def secrets_of(homes: list[SiteHome]) -> list[str]:
    """Return private keys as they might be logged: PEM lines, and bytes as text."""
    found = []
    for home in homes:
        keys = [path for path in (home.directory / "keys").iterdir() if path.suffix != ".crt"]
        assert keys
        for path in keys:
            content = path.read_bytes()
            lines = [line for line in content.decode(errors="replace").splitlines() if line]
            inner = [line for line in lines if not line.startswith("-")]
            assert inner
            found += [line[:32] for line in inner]
            raw = base64.b64decode("".join(inner))
            found += [raw[-32:].hex(), base64.b64encode(raw[-32:]).decode()[:40]]
    return found


def weights_of(home: SiteHome) -> list[str]:
    """Return some weights of the last model, formatted as Python and torch would."""
    path = next((home.state_dir / "models").glob("*.safetensors"))
    found = []
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_tensor(name).flatten()[:50]
            values = [value for value in tensor.tolist() if math.fabs(value) > 1e-3]
            found += [f"{value:.6f}".lstrip("-") for value in values] + list(map(str, values))
            found.append(tensor.numpy().tobytes()[:16].hex())
    return found
