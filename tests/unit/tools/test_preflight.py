"""The local checks of `check`, with real folders, ports and workers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightyear_node.config.federation import load_federation_config
from lightyear_node.identity.invite import Invite
from lightyear_node.identity.keys import LIFETIME, make_identity
from lightyear_node.lab.federation import SiteHome, lay_out, package_environment, site_names
from lightyear_node.node.home import Home, load_home
from lightyear_node.storage.journal import Journal
from lightyear_node.tools.diagnosis import UNKNOWN_DIGEST, Diagnosis
from lightyear_node.tools.peers_file import peer_of, write_peers_file
from lightyear_node.tools.preflight import (
    LocalModel,
    check_peers,
    model_checks,
    port_checks,
    settings_checks,
    state_checks,
)
from lightyear_node.types import Check, Digest, Mark, PeerName

NOW = datetime.now(UTC)
SCHEMA = Digest("5" * 64)


@pytest.fixture
def site(tmp_path: Path) -> SiteHome:
    return lay_out(tmp_path, site_names(2))[0]


def loaded(site: SiteHome, **settings: Any) -> Home:
    peers = site.directory / "peers.yaml"
    return load_home(site.directory, peers, environment={}, flags=settings, now=NOW)


def run(site: SiteHome, *arguments: str) -> tuple[int, dict[str, Check]]:
    """The exit code and the checks of `check`."""
    code, data = run_for_data(site, *arguments)
    return code, by_name(Check(**one) for one in data["checks"])


def run_for_data(site: SiteHome, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the JSON output of `check`."""
    ended = subprocess.run(
        [sys.executable, "-m", "lightyear_node", "check", "--format", "json", *arguments],
        cwd=site.directory,
        env=package_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in ended.stderr
    return ended.returncode, json.loads(ended.stdout)["data"]


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_invalid_settings_are_reported_with_advice(site: SiteHome) -> None:
    os.chmod(site.directory / "keys/tls.key", 0o644)
    code, checks = run(site)
    assert code == 3
    assert list(checks) == ["settings"]
    assert "can be read by others" in checks["settings"].about
    assert "chmod 600" in checks["settings"].advice


def test_a_task_that_cannot_be_built_is_reported_and_leaves_no_state(site: SiteHome) -> None:
    path = site.directory / "node.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "task": {"entry": "no:x"}}))
    code, checks = run(site, "--timeout", "1")
    assert code == 3
    assert checks["model"].mark == Mark.BROKEN
    assert "no module named `no`" in checks["model"].about
    assert checks["model"].advice
    assert checks["state"].about.endswith("will be created")
    assert not site.state_dir.exists()


def test_an_expiring_certificate_and_a_writable_keys_folder_are_warnings(site: SiteHome) -> None:
    soon = make_identity(site.name, NOW - LIFETIME + timedelta(days=12, hours=1))
    keys = site.directory / "keys"
    for file in keys.iterdir():
        file.unlink()
    soon.save(keys)
    keys.chmod(0o777)
    peers = site.directory / "peers.yaml"
    agreement = load_federation_config(peers)
    ours = peer_of(Invite(site.name, site.address, soon.certificate))
    others = tuple(peer for peer in agreement.peers if peer.name != site.name)
    write_peers_file(peers, agreement.model_copy(update={"peers": (ours, *others)}))
    checks = by_name(settings_checks(loaded(site), NOW))
    assert checks["settings"].mark is Mark.HOLDS
    assert checks["certificate"].mark is Mark.DIFFERS
    assert checks["certificate"].about.startswith("12 days left")
    assert checks["keys"].mark is Mark.DIFFERS
    assert "chmod 700" in checks["keys"].advice


def test_ports_are_free_or_in_use_or_on_another_machine(site: SiteHome) -> None:
    assert {check.mark for check in port_checks(loaded(site))} == {Mark.HOLDS}
    with socket.create_server(("127.0.0.1", int(site.address.rpartition(":")[2]))):
        checks = by_name(port_checks(loaded(site)))
    assert checks["listen"].mark is Mark.BROKEN
    assert "stop the other program" in checks["listen"].advice
    assert checks["http"].mark is Mark.HOLDS
    # An address reserved for documentation, which no machine has.
    elsewhere = by_name(port_checks(loaded(site, listen="203.0.113.7:7443")))["listen"]
    assert elsewhere.mark is Mark.BROKEN
    assert "0.0.0.0:7443" in elsewhere.advice


def test_http_access_from_other_machines_is_checked(site: SiteHome) -> None:
    def checked(**http: object) -> Check:
        listen = f"0.0.0.0:{site.http_address.rpartition(':')[2]}"
        return by_name(port_checks(loaded(site, http={"listen": listen, **http})))["http"]

    assert checked().mark is Mark.BROKEN
    assert "http.token_file" in checked().advice
    assert "token is missing" in checked(token_file="token").about
    (site.directory / "token").write_text("0" * 64)
    (site.directory / "token").chmod(0o600)
    assert checked(token_file="token").mark is Mark.DIFFERS
    assert "unencrypted" in checked(token_file="token").about


def test_a_state_directory_that_cannot_be_written_is_reported(site: SiteHome) -> None:
    home = loaded(site, state_dir="node.yaml/state")
    assert by_name(state_checks(home, None))["state"].mark is Mark.BROKEN


def test_the_disk_must_have_room_for_the_models_of_all_sites(site: SiteHome) -> None:
    home = loaded(site)
    assert by_name(state_checks(home, LocalModel(raw_bytes=1)))["disk"].mark is Mark.HOLDS
    disk = by_name(state_checks(home, LocalModel(raw_bytes=2**50)))["disk"]
    assert disk.mark is Mark.BROKEN
    # Five models, three of our updates and one of the other site, two optimizer states of two
    # models each, three encoded copies; two models are the reserve, and some MiB are rounded off.
    assert f"{18 * 2**20:.1f} GiB needed" in disk.about
    assert f"{2 * 2**20:.1f} GiB are to stay free" in disk.about


def test_a_quota_too_small_for_a_round_is_reported(site: SiteHome) -> None:
    home = loaded(site, disk={"quota": "100MiB"}, keep={"models": 1})
    assert by_name(state_checks(home, LocalModel(raw_bytes=1)))["disk"].mark is Mark.HOLDS
    disk = by_name(state_checks(home, LocalModel(raw_bytes=50 << 20)))["disk"]
    assert disk.mark is Mark.BROKEN
    assert "disk.quota is 100.0 MiB, but this site's rounds need 358.0 MiB: 3 models" in disk.about
    assert "disk.quota" in disk.advice


def test_little_free_space_is_a_warning(site: SiteHome, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = shutil.disk_usage(site.directory)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: actual._replace(free=100 << 20))
    home = loaded(site, disk={"reserve": "50MB"})
    disk = by_name(state_checks(home, LocalModel(raw_bytes=1)))["disk"]
    assert disk.mark is Mark.DIFFERS
    assert "47.7 MiB are to stay free: little to spare" in disk.about
    home = loaded(site, disk={"reserve": "99MiB"})
    assert by_name(state_checks(home, LocalModel(raw_bytes=1)))["disk"].mark is Mark.BROKEN


def test_a_state_directory_of_another_model_is_reported(site: SiteHome) -> None:
    site.state_dir.mkdir()
    journal = Journal(site.state_dir / "journal.db")
    journal.append("start", {}, wall_ns=0, lamport=1, round=0, remember={"schema": SCHEMA})
    journal.close()
    home = loaded(site)
    assert by_name(state_checks(home, LocalModel(SCHEMA)))["state"].mark is Mark.HOLDS
    other = by_name(state_checks(home, LocalModel(Digest("6" * 64))))["state"]
    assert other.mark is Mark.BROKEN
    assert "other tensors" in other.about


def test_a_damaged_journal_is_reported(site: SiteHome) -> None:
    site.state_dir.mkdir()
    (site.state_dir / "journal.db").write_bytes(b"garbage" * 1000)
    [state] = state_checks(loaded(site), None)
    assert state.mark is Mark.BROKEN
    assert "backup" in state.advice


def test_building_the_model_leaves_no_files(site: SiteHome) -> None:
    before = sorted(site.directory.rglob("*"))
    checks, model = asyncio.run(model_checks(loaded(site)))
    assert by_name(checks)["device"].about
    assert model is not None
    assert UNKNOWN_DIGEST not in (model.schema, model.initial_model)
    assert sorted(site.directory.rglob("*")) == before


def test_a_site_that_trains_alone_checks_no_peers(site: SiteHome) -> None:
    path = site.directory / "peers.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "rule": {"name": "local"}}))
    code, checks = run(site, "--no-model")
    assert code == 0
    assert "trains alone" in checks["listen"].about


def test_a_peer_without_an_address_is_not_called(site: SiteHome) -> None:
    home = loaded(site)
    peers = [peer.model_copy(update={"address": None}) for peer in home.federation.peers]
    agreement = home.federation.model_copy(update={"peers": tuple(peers)})
    without_addresses = dataclasses.replace(home, federation=agreement)
    reported: list[Diagnosis] = []
    found = asyncio.run(
        check_peers(
            without_addresses,
            [PeerName("site-b")],
            LocalModel(),
            now=NOW,
            timeout_s=1.0,
            on_result=reported.append,
        )
    )
    assert found == reported
    assert not found[0].broken
    assert "it dials us" in found[0].about


BROKEN_TASK = """
from lightyear_node.lab.tasks import digits

def build(**arguments):
    task = digits.build(**arguments)
    def sensitivity(logits, target):
        raise ValueError("unknown class 11 in scan-0042")
    task.metrics = {**task.metrics, "sensitivity": sensitivity}
    return task
"""


def test_a_metric_that_fails_is_named_with_its_text_and_nothing_is_changed(site: SiteHome) -> None:
    (site.directory / "broken_task.py").write_text(BROKEN_TASK)
    path = site.directory / "node.yaml"
    entry = {"task": {"entry": "broken_task:build"}}
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **entry}))
    before = {file: file.stat().st_mtime_ns for file in site.directory.rglob("*.*")}
    code, data = run_for_data(site, "--timeout", "1")
    checks = by_name(Check(**one) for one in data["checks"])
    assert code == 3
    assert data["exchange"]["tensors"] == 8
    assert data["exchange"]["local"] == []
    assert checks["training"].about.startswith("one step, loss ")
    assert checks["validation"].mark == Mark.HOLDS
    assert checks["metric accuracy"].mark == Mark.HOLDS
    failed = checks["metric sensitivity"]
    assert failed.mark == Mark.BROKEN
    assert "raised ValueError: unknown class 11 in scan-0042" in failed.about
    assert "no tensor stays here" in checks["exchange"].about
    after = {file: file.stat().st_mtime_ns for file in site.directory.rglob("*.*")}
    assert {file for file in after if "__pycache__" not in file.parts} == set(before)
    assert all(after[file] == before[file] for file in before)


def test_a_task_that_kills_its_worker_in_training_is_reported(site: SiteHome) -> None:
    (site.directory / "fatal_task.py").write_text(
        "import os\n"
        "from lightyear_node.lab.tasks import digits\n\n"
        "def build(**arguments):\n"
        "    task = digits.build(**arguments)\n"
        "    task.train_round = lambda model, optimizer, device: os._exit(9)\n"
        "    return task\n"
    )
    path = site.directory / "node.yaml"
    entry = {"task": {"entry": "fatal_task:build"}}
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **entry}))
    code, checks = run(site, "--timeout", "1")
    assert code == 3
    assert checks["model"].mark == Mark.HOLDS
    assert checks["training"].mark == Mark.BROKEN
    assert "died (exit code 9) during `rehearse`" in checks["training"].about
    assert checks["training"].advice


SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
import lightyear_node.training as ly

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
x, y = torch.randn(60, 4), torch.arange(60) % 3
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def accuracy(logits, target):
    return (logits.argmax(1) == target).float().mean()

ly.init(model, val_data=[(x, y)], loss=F.cross_entropy, metrics={"accuracy": accuracy})
while ly.running():
    ly.receive(model)
    TRAINING
    ly.send(model)
"""
STEP = "F.cross_entropy(model(x), y).backward(); optimizer.step(); open('later', 'w')"


@pytest.mark.parametrize(
    ("training", "mark", "about"),
    [
        (STEP, Mark.HOLDS, "one step of the script"),
        ("pass", Mark.BROKEN, "training took no step of an optimizer"),
        ("raise RuntimeError('scan-7')", Mark.BROKEN, "RuntimeError: scan-7 (train.py:17)"),
        ("raise SystemExit(3)", Mark.BROKEN, "ended with exit code 3 in round 0, before `send`"),
        ("break", Mark.BROKEN, "the script ended in round 0, before `send`"),
        (
            "model[0].weight.grad = torch.full((8, 4), float('nan')); optimizer.step()",
            Mark.BROKEN,
            "after one step 1 of 4 tensors have values that are not finite",
        ),
    ],
)
def test_a_script_is_tried_until_its_first_step(
    site: SiteHome, training: str, mark: Mark, about: str
) -> None:
    (site.directory / "train.py").write_text(SCRIPT.replace("TRAINING", training))
    path = site.directory / "node.yaml"
    task = {"task": {"script": "train.py"}}
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **task}))
    _, checks = run(site, "--timeout", "1")
    assert checks["training"].mark == mark
    assert about in checks["training"].about
    assert checks["validation"].mark == Mark.HOLDS
    assert checks["metric accuracy"].mark == Mark.HOLDS
    assert not (site.directory / "later").exists()
