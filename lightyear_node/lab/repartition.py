"""Gives the sites' tasks a new partition of their data.

The data of all sites are pooled, split by split, and divided again.  A task that does not depend on
the site has the whole data set, which is then divided.  Needs data that can be indexed: a loader
over a map-style data set, or a list of batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from lightyear_node.errors import ConfigError
from lightyear_node.lab.partition import PartitionConfig, divide
from lightyear_node.lab.tasks.prepared import Batches
from lightyear_node.worker.task import Task
from lightyear_node.worker.training import split_batch

SPLITS = ("train_data", "val_data", "test_data")
HINT = "give the task loaders over indexable data sets, or leave out `partition`"


@dataclass(frozen=True, slots=True)
class _Pool:
    """The samples of one split of all sites."""

    size: int
    batches: Callable[[], Iterable[Any]]
    """All samples in order."""
    chosen: Callable[[NDArray[np.int64]], Iterable[Any]]
    """A loader of these rows."""


def same_at_every_site(builder: Callable[..., Any]) -> bool:
    """Whether a task's function cannot know its site, so that every site gets the same data."""
    parameters = inspect.signature(builder).parameters
    return not {"site_index", "site_name"} & parameters.keys()


def repartitioned(
    tasks: Sequence[Task], sites: int, config: PartitionConfig, seed: int
) -> list[Task]:
    """Divide the data of `tasks` among `sites`; the tasks' first decides everything else."""
    first = tasks[0]
    if first.train_round is not None or first.evaluate is not None:
        raise ConfigError(
            "a task with its own `train_round` or `evaluate` cannot be partitioned",
            hint="divide its data in the task: lightyear_node.partition gives row numbers",
        )
    pools = {
        split: _pool(split, [getattr(task, split) for task in tasks])
        for split in SPLITS
        if getattr(first, split) is not None
    }
    labels = [_labels(first, pool, config) for pool in pools.values()]
    seeded = config if config.seed is not None else config.model_copy(update={"seed": seed})
    rows = dict(zip(pools, divide(labels, sites, seeded), strict=True))
    return [
        _with_rows(first, pools, {s: parts[n] for s, parts in rows.items()}) for n in range(sites)
    ]


def _with_rows(
    task: Task, pools: Mapping[str, _Pool], rows: Mapping[str, NDArray[np.int64]]
) -> Task:
    loaders: dict[str, Any] = {split: pool.chosen(rows[split]) for split, pool in pools.items()}
    return replace(task, samples=None, **loaders)


def _pool(split: str, parts: Sequence[Any]) -> _Pool:
    if all(isinstance(part, Batches) for part in parts):
        return _pool_of_tensors(parts)
    if all(isinstance(part, list | tuple) for part in parts):
        return _pool_of_loaders([_loader_of(split, part) for part in parts])
    for part in parts:
        if not isinstance(part, DataLoader) or isinstance(part.dataset, IterableDataset):
            raise ConfigError(
                f"partition: `{split}` is a {type(part).__name__} that cannot be indexed", hint=HINT
            )
        sampler, data = part.sampler, cast(Sized, part.dataset)
        plain = isinstance(sampler, RandomSampler | SequentialSampler)
        if not plain or part.batch_size is None or len(cast(Sized, sampler)) != len(data):
            raise ConfigError(f"partition: `{split}` has a sampler of its own", hint=HINT)
    return _pool_of_loaders(parts)


def _pool_of_tensors(parts: Sequence[Batches]) -> _Pool:
    x, y = torch.cat([one.dataset for one in parts]), torch.cat([one.targets for one in parts])
    first = parts[0]

    def chosen(rows: NDArray[np.int64]) -> Batches:
        index = torch.from_numpy(rows)
        return Batches(
            x[index], y[index], first.batch_size, shuffle=first.shuffle, augment=first.augment
        )

    return _Pool(len(x), lambda: Batches(x, y, first.batch_size), chosen)


def _pool_of_loaders(loaders: Sequence[DataLoader[Any]]) -> _Pool:
    first = loaders[0]
    data: Any = ConcatDataset([loader.dataset for loader in loaders])

    def loader(dataset: Any, **order: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            first.batch_size,
            num_workers=first.num_workers,
            collate_fn=first.collate_fn,
            **order,
        )

    order = {"shuffle": isinstance(first.sampler, RandomSampler), "drop_last": first.drop_last}
    return _Pool(
        len(data), lambda: loader(data), lambda rows: loader(Subset(data, rows.tolist()), **order)
    )


def _loader_of(split: str, batches: Sequence[Any]) -> DataLoader[Any]:
    pairs = [batch for batch in batches if isinstance(batch, tuple | list) and len(batch) == 2]
    tensors = all(isinstance(part, Tensor) for pair in pairs for part in pair)
    if not pairs or len(pairs) < len(batches) or not tensors:
        raise ConfigError(f"partition: `{split}` is no list of (input, target)", hint=HINT)
    x, y = (torch.cat([pair[place] for pair in pairs]) for place in (0, 1))
    return DataLoader(TensorDataset(x, y), len(pairs[0][0]))


def _labels(task: Task, pool: _Pool, config: PartitionConfig) -> NDArray[np.int64]:
    """The class of each sample; zeros if the partition does not need them."""
    if not config.needs_labels:
        return np.zeros(pool.size, dtype=np.int64)
    targets = [split_batch(task, batch)[1] for batch in pool.batches()]
    labels = torch.cat([torch.as_tensor(one).cpu() for one in targets])
    whole = labels.long()
    if labels.numel() != pool.size or not torch.equal(whole.to(labels.dtype), labels):
        raise ConfigError(
            f"partition {config.kind}: the targets are not class labels",
            hint="use partition `iid` or `size`, which need none",
        )
    return whole.reshape(-1).numpy()
