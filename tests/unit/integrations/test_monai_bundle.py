"""A MONAI bundle becomes a task; what it lacks is named."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from lightyear_node import Task, load_task
from lightyear_node.config.federation import RuleConfig
from lightyear_node.errors import ConfigError, LightyearError, TaskFailed
from lightyear_node.lab.federation import lay_out, package_environment, site_names
from lightyear_node.node.home import BUNDLE_ENTRY
from lightyear_node.types import Digest, PeerName
from lightyear_node.worker.job_types import CandidateFile
from lightyear_node.worker.site import LocalSite
from tests.support.paths import ROOT

BUNDLE = ROOT / "examples" / "monai_bundle"
SEED = 3


@pytest.fixture(autouse=True)
def own_scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each bundle has its own package `scripts`."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [one for one in sys.modules if one.partition(".")[0] == "scripts"]:
        del sys.modules[name]


def task_of(bundle: Path, site_index: int = 0, **overrides: Any) -> Task:
    torch.manual_seed(SEED)
    arguments = {"bundle": str(bundle), "overrides": overrides}
    context = {"site_name": f"site-{site_index}", "site_index": site_index, "seed": SEED}
    return load_task(BUNDLE_ENTRY, arguments, context)


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of the bundle with another configuration."""
    shutil.copytree(BUNDLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "configs" / "train.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return folder


def local_site(task: Task, name: str) -> LocalSite:
    return LocalSite(task, name=name, seed=SEED, rule=RuleConfig(), device="cpu")


def test_two_sites_train_judge_and_merge_a_bundle(tmp_path: Path) -> None:
    sites = [local_site(task_of(BUNDLE, index), f"site-{index}") for index in range(2)]
    for index, site in enumerate(sites):
        site.write_initial(tmp_path / f"base-{index}")
    start = (tmp_path / "base-0").read_bytes()
    assert start == (tmp_path / "base-1").read_bytes()
    dice = []
    for round in range(2):
        for index, site in enumerate(sites):
            trained = site.train(
                base=tmp_path / f"base-{index}",
                carry=tmp_path / f"carry-{index}-{round - 1}" if round else None,
                round=round,
                own=tmp_path / f"own-{index}-{round}",
                outgoing=tmp_path / "unused",
                carry_out=tmp_path / f"carry-{index}-{round}",
            )
        peer = CandidateFile(PeerName("site-1"), str(tmp_path / f"own-1-{round}"), 8, Digest("0"))
        own = tmp_path / f"own-0-{round}"
        [verdict] = (
            sites[0].judge(own=own, before=tmp_path / "base-0", peers=[peer], round=round).verdicts
        )
        assert verdict.checks["agreement"] > 0.9
        assert verdict.checks["regret"] < verdict.checks["regret_max"]
        merged = sites[0].merge(
            own=own, accepted=[(peer, 0.5)], round=round, out=tmp_path / "base-0"
        )
        (tmp_path / "base-1").write_bytes((tmp_path / "base-0").read_bytes())
        dice.append(trained.metrics["mean_dice"])
        assert set(merged.metrics) == {"loss", "mean_dice"}
    assert min(dice) > 0.6  # 0.12 before training


def test_peers_are_judged_on_windows_of_one_size_around_the_label() -> None:
    task = task_of(BUNDLE)
    shapes = {tuple(batch["image"].shape[2:]) for batch in task.test_data or ()}
    assert shapes == {(20, 20, 20), (22, 22, 22), (18, 18, 18)}
    batches = list(task.val_data)
    assert [tuple(batch["image"].shape) for batch in batches] == [(4, 1, 16, 16, 16)] * 3
    inside = sum(float(batch["label"].sum()) for batch in batches)
    whole = sum(float(batch["label"].sum()) for batch in task.test_data or ())
    assert 0.95 * whole < inside <= whole


def test_volumes_smaller_than_the_window_are_padded() -> None:
    size = {"validate::inferer::roi_size": [24, 24, 24]}
    batches = list(task_of(BUNDLE, **size).val_data)
    assert {tuple(batch["image"].shape[2:]) for batch in batches} == {(24, 24, 24)}


def test_arguments_override_the_configuration() -> None:
    task = task_of(BUNDLE, **{"epochs": 7, "optimizer::lr": 0.5})
    assert task.epochs == 7
    network = task.model()  # type: ignore[operator]
    optimizer = task.optimizer(network.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.5
    held = optimizer.param_groups[0]["params"]
    assert [id(one) for one in held] == [id(one) for one in network.parameters()]


def test_a_copy_of_the_network_has_an_optimizer_of_its_own() -> None:
    task = task_of(BUNDLE)
    task.model()  # type: ignore[operator]
    other = nn.Linear(2, 2)
    optimizer = task.optimizer(other.parameters())
    assert [id(one) for one in optimizer.param_groups[0]["params"]] == [
        id(one) for one in other.parameters()
    ]
    assert optimizer.param_groups[0]["lr"] == 0.003


@pytest.mark.parametrize(
    "key", ["network_def", "loss", "optimizer", "train::dataloader", "validate::dataloader"]
)
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    def remove(config: dict[str, Any]) -> None:
        *tables, last = key.split("::")
        for table in tables:
            config = config[table]
        del config[last]

    with pytest.raises(ConfigError, match=f"has no `{key}` in train.json") as caught:
        task_of(changed(tmp_path / "bundle", remove))
    assert key in str(caught.value.hint)


def handler(config: dict[str, Any]) -> None:
    config["validate"]["key_metric"]["mean_dice"]["_target_"] = "no_such_package.metrics.Dice"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            lambda config: config["loss"].update(no_such_option=1),
            TaskFailed,
            "`loss` of the bundle .* cannot be built: .*no_such_option",
        ),
        (handler, LightyearError, "`validate::key_metric` of the bundle .*no_such_package"),
        (
            lambda config: config.update(initialize=["$undefined_name + 1"]),
            TaskFailed,
            "`initialize` of the bundle .*undefined_name",
        ),
    ],
)
def test_a_key_that_cannot_be_built_is_named(
    tmp_path: Path, change: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        task_of(changed(tmp_path / "bundle", change))
    assert re.search(words, str(caught.value), re.DOTALL)


def test_an_unknown_override_and_a_folder_without_a_bundle_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no key `epoch`, which `task\.args`") as caught:
        task_of(BUNDLE, epoch=2)
    assert "epochs" in str(caught.value.hint)
    with pytest.raises(ConfigError, match=r"has no configs/train\.json"):
        task_of(tmp_path)


def test_handlers_that_are_not_run_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def add(config: dict[str, Any]) -> None:
        config["train"]["handlers"] = [{"_target_": "LrScheduleHandler"}]

    task_of(changed(tmp_path / "bundle", add))
    assert "not run, the node does this itself: train::handlers" in capsys.readouterr().err


@pytest.mark.slow
def test_check_builds_the_bundle_that_node_yaml_names(tmp_path: Path) -> None:
    site = lay_out(tmp_path, site_names(2))[0]
    shutil.copytree(BUNDLE, site.directory / "bundle", ignore=shutil.ignore_patterns("__pycache__"))
    path = site.directory / "node.yaml"
    settings = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**settings, "task": {"bundle": "bundle"}}))
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "lightyear_node", "check", "--format", "json"),
            *("--timeout", "1", "--home", str(site.directory)),
            *("--peers", str(site.directory / "peers.yaml")),
        ],
        cwd=tmp_path,
        env=package_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    checks = {one["name"]: one for one in json.loads(ended.stdout)["data"]["checks"]}
    assert checks["training"]["about"].startswith("one step, loss ")
    assert checks["metric mean_dice"]["mark"] == "holds"
    assert "no tensor stays here" in checks["exchange"]["about"]
