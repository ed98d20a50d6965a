"""What all colluders know, in the order of the sites' names.

Colluders that send one common message must compute the same numbers, so they read updates and data
in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightyear_node.lab.attacks.weights_math import Tensors
from lightyear_node.lab.malfunction_plugins import AttackContext
from lightyear_node.worker.task import Task
from lightyear_node.worker.training import split_batch


def colluders_updates(update: Tensors, context: AttackContext) -> list[Tensors]:
    """What the colluders trained honestly, this site included."""
    known = {context.site: update, **context.colluders}
    return [known[name] for name in sorted(known)]


def all_updates(update: Tensors, context: AttackContext) -> list[Tensors]:
    """What all sites trained honestly, malfunctioning or not."""
    known = {context.site: update, **context.colluders, **context.honest}
    return [known[name] for name in sorted(known)]


def colluders_tasks(context: AttackContext) -> list[Task]:
    known = {context.site: context.task, **context.partners}
    return [known[name] for name in sorted(known)]


def batches_of(tasks: Sequence[Task], split: str) -> list[tuple[Any, Any]]:
    """(input, target) of all batches of `train_data` or `val_data` of these tasks.

    A loader that shuffles gives the same order at every colluder.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [split_batch(task, batch) for task in tasks for batch in getattr(task, split)]
