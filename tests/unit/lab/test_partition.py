"""Partitions: shares by label and size, equal for equal seeds, on any indexable data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from lightyear_node import LightyearError, Task, partition, simulate
from lightyear_node.errors import ConfigError
from lightyear_node.lab.partition import PartitionConfig, config_of
from lightyear_node.lab.repartition import repartitioned
from lightyear_node.lab.tasks.prepared import Batches

LABELS = np.repeat(np.arange(10), 100)
"""1,000 samples of ten classes, sorted."""


def mixtures(parts: list[Any], labels: np.ndarray = LABELS) -> np.ndarray:
    """The number of samples by site and class."""
    return np.stack([np.bincount(labels[rows], minlength=10) for rows in parts])


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "labels", "size"])
def test_every_sample_has_one_site_and_seeds_decide(kind: str) -> None:
    parts = partition(LABELS, 5, kind, seed=3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
    again, other = partition(LABELS, 5, kind, seed=3), partition(LABELS, 5, kind, seed=4)
    assert all(np.array_equal(one, two) for one, two in zip(parts, again, strict=True))
    assert any(not np.array_equal(one, two) for one, two in zip(parts, other, strict=True))
    # Shuffled: the first samples of a site are not all of its first class.
    assert all(len(rows) < 20 or len(set(LABELS[rows[:20]])) > 1 for rows in parts)


def test_iid_gives_equal_shares_with_similar_mixtures() -> None:
    counts = mixtures(partition(LABELS, 4, "iid"))
    assert counts.sum(axis=1).tolist() == [250] * 4
    assert counts.min() >= 10
    assert [len(rows) for rows in partition(LABELS[:11], 3, "iid", samples_min=1)] == [4, 3, 4]


def test_a_small_alpha_is_more_uneven_than_a_large_one() -> None:
    def unevenness(kind: str, alpha: float) -> float:
        """Deviation of the sites' shares, over several draws."""
        draws = [mixtures(partition(LABELS, 5, kind, alpha=alpha, seed=n)) for n in range(10)]
        return float(np.mean([counts.std(axis=0).mean() for counts in draws]))

    for kind in ("dirichlet", "size"):
        assert unevenness(kind, 0.2) > 1.5 * unevenness(kind, 2.0) > 3 * unevenness(kind, 1000.0)


def test_by_size_the_sites_have_the_same_mixture() -> None:
    parts = partition(LABELS, 3, "size", alpha=1.0, seed=1)
    sizes = np.array([len(rows) for rows in parts])
    assert sizes.max() > 2 * sizes.min()
    largest = mixtures(parts)[sizes.argmax()] / sizes.max()
    assert abs(largest - 0.1).max() < 0.05


@pytest.mark.parametrize(("sites", "classes"), [(5, 2), (10, 1), (7, 3), (20, 2)])
def test_by_label_a_site_has_so_many_classes_and_classes_are_shared_evenly(
    sites: int, classes: int
) -> None:
    counts = mixtures(partition(LABELS, sites, "labels", classes=classes, samples_min=1))
    assert ((counts > 0).sum(axis=1) == classes).all()
    holders = (counts > 0).sum(axis=0)
    assert holders.min() >= 1
    assert holders.max() - holders.min() <= 1
    assert counts.sum() == 1000


def test_with_few_sites_some_classes_are_not_used() -> None:
    counts = mixtures(partition(LABELS, 2, "labels", classes=3))
    assert ((counts > 0).sum(axis=1) == 3).all()
    assert (counts.sum(axis=0) == 0).sum() == 4


def test_a_site_never_has_fewer_samples_than_asked_for() -> None:
    for seed in range(20):
        for rows in partition(LABELS, 8, "dirichlet", alpha=0.1, samples_min=40, seed=seed):
            assert len(rows) >= 25  # a fifth of an equal share is the most that is required
    with pytest.raises(ConfigError, match="4 sites would not all have") as caught:
        partition([0, 0, 0], 4, "iid", samples_min=1)
    assert "fewer sites" in (caught.value.hint or "")


def test_labels_may_be_any_numbers() -> None:
    odd = LABELS * 7 - 3
    for one, two in zip(partition(odd, 4, seed=2), partition(LABELS, 4, seed=2), strict=True):
        assert np.array_equal(one, two)
    assert len(partition(LABELS.tolist(), 4)) == 4


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "dirichlt"}, "kind: Input should be 'iid', 'dirichlet', 'labels' or 'size'"),
        ({"kind": "iid", "alpha": 1.0}, "partition iid has no `alpha`"),
        ({"kind": "dirichlet", "classes": 2}, "partition dirichlet has no `classes`"),
        ({"kind": "dirichlet", "alpha": 0}, "alpha: Input should be greater than 0"),
        ({"kind": "labels", "classes": 0}, "classes: Input should be greater than or equal to 1"),
        ({"kind": "iid", "beta": 1}, "beta: Extra inputs"),
    ],
)
def test_a_wrong_partition_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(wrong)


def test_more_classes_than_there_are_is_an_error() -> None:
    with pytest.raises(ConfigError, match="the data has 10 classes only"):
        partition(LABELS, 2, "labels", classes=11)
    with pytest.raises(ConfigError, match="at least one site, not 0"):
        partition(LABELS, 0, "iid")


def test_defaults_are_part_of_what_is_computed() -> None:
    assert config_of("dirichlet").computed() == {
        "kind": "dirichlet",
        "alpha": 0.5,
        "samples_min": 10,
    }
    assert config_of({"kind": "labels", "seed": 4}).computed()["classes"] == 2


# --- tasks ---------------------------------------------------------------------------------------

CLASSES = 3


def samples(count: int, start: int) -> TensorDataset:
    """Samples whose input is their number, and whose class is that number modulo 3."""
    x = torch.arange(start, start + count, dtype=torch.float32)[:, None]
    return TensorDataset(x, (x[:, 0] % CLASSES).long())


class Dictionaries(Dataset[Any]):
    def __init__(self, count: int, start: int) -> None:
        self._samples = samples(count, start)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        x, y = self._samples[row]
        return {"image": x, "label": y}


def task_of(make: Callable[[int, int], Any], index: int, **changes: Any) -> Task:
    parts = {"train_data": (60, 0), "val_data": (30, 1000), "test_data": (30, 2000)}
    data = {name: make(count, start + 100 * index) for name, (count, start) in parts.items()}
    return Task(
        model=lambda: torch.nn.Linear(1, CLASSES),
        loss=functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
        **{**data, **changes},
    )


def loader(count: int, start: int) -> DataLoader[Any]:
    return DataLoader(samples(count, start), 16, shuffle=True)


def tensors(count: int, start: int) -> Batches:
    return Batches(*samples(count, start).tensors, 16, shuffle=True)


def batches(count: int, start: int) -> list[Any]:
    return list(DataLoader(samples(count, start), 16))


def dictionaries(count: int, start: int) -> DataLoader[Any]:
    return DataLoader(Dictionaries(count, start), 16, shuffle=True)


def numbers(data: Any) -> list[int]:
    found = []
    for batch in data:
        x, y = (batch["image"], batch["label"]) if isinstance(batch, dict) else batch
        assert torch.equal((x[:, 0] % CLASSES).long(), y)
        found += x[:, 0].long().tolist()
    return sorted(found)


@pytest.mark.parametrize("make", [loader, tensors, batches, dictionaries])
@pytest.mark.parametrize("kind", ["iid", "dirichlet", "labels", "size"])
def test_the_data_of_all_sites_are_divided_again(make: Callable[..., Any], kind: str) -> None:
    tasks = [task_of(make, index, samples=99) for index in range(3)]
    config = PartitionConfig(kind=kind, classes=1 if kind == "labels" else None)
    divided = repartitioned(tasks, 3, config, seed=5)
    for split in ("train_data", "val_data", "test_data"):
        before = [numbers(getattr(task, split)) for task in tasks]
        after = [numbers(getattr(task, split)) for task in divided]
        assert sorted(chain(*after)) == sorted(chain(*before))
        if kind == "labels":
            assert all(len({number % CLASSES for number in one}) == 1 for one in after)
    assert {task.samples for task in divided} == {None}
    if kind == "labels":
        # The validation data have the class of the training data.
        for task in divided:
            assert numbers(task.train_data)[0] % CLASSES == numbers(task.val_data)[0] % CLASSES
    again = repartitioned(tasks, 3, config, seed=5)
    assert [numbers(task.val_data) for task in again] == [numbers(t.val_data) for t in divided]
    if kind != "labels":  # with one class for each of three sites, only their order differs
        other = repartitioned(tasks, 3, config, seed=6)
        assert [numbers(t.val_data) for t in other] != [numbers(t.val_data) for t in divided]


def test_training_data_are_augmented_again() -> None:
    def negative(count: int, start: int) -> Batches:
        return Batches(*samples(count, start).tensors, 16, augment=torch.neg)

    [first, _] = repartitioned([task_of(negative, 0)], 2, PartitionConfig(kind="iid"), seed=0)
    assert all(bool((x <= 0).all()) for x, _ in first.train_data)


def test_training_data_keep_their_batch_size_and_are_shuffled_again() -> None:
    [first, _] = repartitioned([task_of(loader, 0)], 2, PartitionConfig(kind="iid"), seed=0)
    assert isinstance(first.train_data, DataLoader)
    assert first.train_data.batch_size == 16
    torch.manual_seed(0)
    one, two = ([x for x, _ in first.train_data] for _ in range(2))
    assert not torch.equal(torch.cat(one), torch.cat(two))
    missing = repartitioned(
        [task_of(loader, 0, test_data=None)], 2, PartitionConfig(kind="iid"), seed=0
    )
    assert all(task.test_data is None for task in missing)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(1), 0)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_data": DataLoader(Stream(), 2)}, "`train_data` is a DataLoader that cannot be"),
        ({"train_data": iter([])}, "`train_data` is a list_iterator that cannot be indexed"),
        ({"val_data": []}, "`val_data` is no list of"),
        (
            {"val_data": DataLoader(samples(9, 0), 3, sampler=SubsetRandomSampler([1, 2]))},
            "`val_data` has a sampler of its own",
        ),
        ({"train_round": lambda *given: None}, "own `train_round` or `evaluate`"),
        ({"evaluate": lambda *given: {}}, "own `train_round` or `evaluate`"),
    ],
)
def test_data_that_cannot_be_divided_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        repartitioned([task_of(loader, 0, **changes)], 2, PartitionConfig(kind="iid"), seed=0)


def test_targets_that_are_not_classes_allow_partitions_without_labels_only() -> None:
    masks = TensorDataset(torch.zeros(60, 1), torch.zeros(60, 4, 4).long())
    fractions = TensorDataset(torch.zeros(60, 1), torch.linspace(0, 1, 60))
    for data in (masks, fractions):
        task = task_of(lambda count, start, data=data: DataLoader(data, 16), 0)
        with pytest.raises(ConfigError, match="the targets are not class labels"):
            repartitioned([task], 3, PartitionConfig(kind="dirichlet"), seed=0)
        assert len(repartitioned([task], 3, PartitionConfig(kind="size"), seed=0)) == 3


def whole_set() -> Task:
    return replace(task_of(loader, 0), epochs=1)


def one_site_each(site_index: int) -> Task:
    return task_of(loader, site_index)


def test_a_task_that_does_not_know_its_site_is_divided_once() -> None:
    """Pooling every site's copy would give the same sample to several sites."""
    sizes = []

    def attack(update: Any, context: Any) -> Any:
        sizes.append(len(context.task.train_data.dataset))
        return update

    common: dict[str, Any] = {
        "rule": "fedavg", "rounds": 1, "sites": 3, "bad": 2, "partition": "iid",
        "malfunction": attack,
    }  # fmt: skip
    simulate(whole_set, **common)
    simulate(one_site_each, **common)
    assert sizes == [20, 20, 60, 60]


def test_a_partition_changes_the_result_and_seeds_repeat_it() -> None:
    def losses(**settings: Any) -> list[float]:
        records = simulate(one_site_each, rule="fedavg", rounds=1, sites=3, bad=0, **settings)
        return [one["merged.loss"] for one in records if one["kind"] == "round"]

    uneven = {"kind": "dirichlet", "alpha": 0.5}
    assert losses(partition=uneven) == losses(partition=uneven) != losses()
    assert losses(partition={**uneven, "seed": 0}) == losses(partition=uneven)
    assert losses(partition={**uneven, "seed": 1}) != losses(partition=uneven)
    with pytest.raises(LightyearError, match="options but no kind"):
        losses(partition={"alpha": 0.5})
    with pytest.raises(LightyearError, match="partition iid has no `alpha`"):
        losses(partition={"kind": "iid", "alpha": 0.5})
