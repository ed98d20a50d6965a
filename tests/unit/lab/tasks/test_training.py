"""The built-in tasks learn, with the worker's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import mean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightyear_node.config.federation import RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.simulate import simulate
from lightyear_node.lab.simulation_records import SimulationSpec
from lightyear_node.lab.tasks import BUILT_IN
from lightyear_node.lab.tasks.networks import SmallUNet
from lightyear_node.lab.tasks.transunet import TransUNet
from lightyear_node.types import PeerName, Reason
from lightyear_node.worker.task import Task
from lightyear_node.worker.training import evaluate, train_one_round

CPU = torch.device("cpu")
JUDGED = {Reason.OK, Reason.TOO_FAR, Reason.AGREEMENT_BELOW_TAU, Reason.LOSS_REGRET}
"""Reasons of a verdict on an update whose tensors and loss are finite."""


def training_loss(task: Task, model: nn.Module) -> float:
    """With the statistics of each batch: running ones need longer than an epoch."""
    model.train()
    losses = []
    with torch.no_grad():
        for x, y in task.train_data:
            losses.append(task.loss(model(x), y).item() * len(x))
    return sum(losses)


@pytest.mark.parametrize(
    ("name", "samples"),
    [("femnist", 320), ("pcam", 96), ("isic", 96), ("hc18", 24), ("cxr_lungs", 16), ("retina", 24)],
)
def test_an_epoch_of_a_small_network_lowers_the_training_loss(
    name: str, samples: int, built: Callable[..., Task]
) -> None:
    _check_learning(built(name, network="small", train_samples=samples), BUILT_IN[name].metric)


def test_an_epoch_on_a_table_lowers_the_training_loss(built: Callable[..., Task]) -> None:
    _check_learning(built("heart"), "accuracy")


def _check_learning(task: Task, metric: str) -> None:
    assert not isinstance(task.model, nn.Module)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    torch.manual_seed(1)
    before = training_loss(task, model)
    train_one_round(task, model, optimizer, CPU, lambda done, total: None)
    torch.manual_seed(1)
    assert training_loss(task, model) < 0.98 * before
    assert task.test_data is not None
    assert 0 <= evaluate(task, model, task.test_data, CPU)[metric] <= 1


ADAM, SGD = torch.optim.Adam, torch.optim.SGD


@pytest.mark.parametrize(
    ("name", "kind", "settings", "batch_size"),
    [
        ("femnist", ADAM, {"lr": 1e-3, "weight_decay": 1e-4}, 32),
        ("pcam", SGD, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 5e-4}, 32),
        ("isic", ADAM, {"lr": 5e-4, "weight_decay": 0}, 32),
        ("hc18", ADAM, {"lr": 1e-3, "weight_decay": 0}, 8),
        ("cxr_lungs", ADAM, {"lr": 1e-3, "weight_decay": 0}, 4),
    ],
)
def test_the_defaults_are_the_papers_settings(
    name: str,
    kind: type[torch.optim.Optimizer],
    settings: dict[str, float],
    batch_size: int,
    built: Callable[..., Task],
) -> None:
    task = built(name, fraction=0.5)
    optimizer = task.optimizer([nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is kind
    assert optimizer.defaults.items() >= settings.items()
    assert len(next(iter(task.train_data))[0]) == batch_size
    assert task.epochs == 1
    other = built(name, fraction=0.2, lr=0.5, batch_size=3, epochs=2)
    assert other.optimizer([nn.Parameter(torch.zeros(1))]).defaults["lr"] == 0.5
    assert len(next(iter(other.train_data))[0]) == 3
    assert other.epochs == 2


@pytest.mark.parametrize("name", ["hc18", "cxr_lungs", "retina"])
@pytest.mark.parametrize(
    ("network", "kind"),
    [
        ("paper", TransUNet),
        ("transunet", TransUNet),
        ("transunet-small", TransUNet),
        ("unetr", nn.Module),
        ("small", SmallUNet),
    ],
)
def test_every_segmentation_task_has_every_network(
    name: str, network: str, kind: type[nn.Module], built: Callable[..., Task]
) -> None:
    task = built(name, network=network, train_samples=2, val_samples=2, test_samples=2)
    assert not isinstance(task.model, nn.Module)
    with torch.device("meta"):
        assert isinstance(task.model(), kind)


def test_training_data_is_shuffled_and_validation_data_is_not(built: Callable[..., Task]) -> None:
    task = built("heart")
    assert not torch.equal(_order(task.train_data), _order(task.train_data))
    assert task.test_data is not None
    for fixed in (task.val_data, task.test_data):
        assert torch.equal(_order(fixed), _order(fixed))


def _order(batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    return torch.cat([x for x, _ in batches])


def test_four_hospitals_learn_together(data: str) -> None:
    spec = SimulationSpec(
        sites=[PeerName(f"client-{i}") for i in range(4)],
        rounds=2,
        seed=0,
        rule=RuleConfig(),
        task=TaskConfig(entry=BUILT_IN["heart"].entry, args={"data": data, "epochs": 4}),
    )
    result = simulate(spec)
    final = result.final("accuracy")
    assert len(final) == 4
    assert sum(final.values()) / 4 > 0.75  # the more frequent class alone gives 0.71
    for rounds in result.sites.values():
        assert [len(one.verdicts) for one in rounds] == [3, 3]


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("pcam", "paper"),
        ("isic", "paper"),
        ("cxr_lungs", "unetr"),
        pytest.param("cxr_lungs", "paper", marks=pytest.mark.slow),
    ],
)
def test_large_networks_run_through_the_worker(name: str, network: str, data: str) -> None:
    """Two rounds, so that the optimizer state and the merged weights are reloaded."""
    arguments = {"data": data, "train_samples": 4, "val_samples": 4, "test_samples": 2}
    spec = SimulationSpec(
        sites=[PeerName("client-0"), PeerName("client-1")],
        rounds=2,
        seed=0,
        rule=RuleConfig(name="fedavg"),
        task=TaskConfig(entry=BUILT_IN[name].entry, args={**arguments, "network": network}),
    )
    final = simulate(spec).final(BUILT_IN[name].metric)
    assert all(0 <= value <= 1 for value in final.values())


FEW = {"train_samples": 16, "val_samples": 8, "test_samples": 2, "batch_size": 8}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sites", "accepted", "arguments"),
    [
        ("femnist", 3, 0.5, {"network": "paper", "train_samples": 64, "val_samples": 32}),
        ("pcam", 2, 0, {"network": "paper", **FEW}),
        ("isic", 2, 0, {"network": "paper", "augment": True, **FEW}),
        ("hc18", 3, 0.5, {"network": "transunet-small", **FEW}),
    ],
)
def test_sites_judge_honest_updates_and_reject_flipped_signs(
    name: str, sites: int, accepted: float, arguments: dict[str, Any], data: str
) -> None:
    """`accepted`: the smallest share of honest updates; 0 where sites differ and data are few."""
    names = [PeerName(f"client-{index}") for index in range(sites)]
    bad = names[-1]
    spec = SimulationSpec(
        sites=names,
        rounds=2,
        seed=0,
        rule=RuleConfig(),
        task=TaskConfig(entry=BUILT_IN[name].entry, args={"data": data, **arguments}),
        malfunctions={bad: MalfunctionConfig(kind="sfa")},
    )
    verdicts = [
        verdict
        for rounds in simulate(spec).sites.values()
        for one in rounds
        for verdict in one.verdicts
    ]
    flipped = [verdict for verdict in verdicts if verdict.peer == bad]
    honest = [verdict for verdict in verdicts if verdict.peer != bad]
    assert (len(flipped), len(honest)) == (2 * (sites - 1), 2 * (sites - 1) ** 2)
    assert not any(verdict.accepted for verdict in flipped)
    for verdict in honest:
        assert verdict.reason in JUDGED
        assert {"distance", "regret"} <= verdict.checks.keys()
        assert verdict.score is not None
        assert 0 < verdict.score <= 1
    assert mean(verdict.accepted for verdict in honest) >= accepted
