"""One round of local training, and the metrics of a model: plain torch, no federation in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightyear_node.errors import TaskFailed
from lightyear_node.worker.task import Task

Progress = Callable[[int, int], None]


def pick_device(wanted: str) -> torch.device:
    if wanted != "auto":
        return torch.device(wanted)
    if torch.cuda.is_available():
        return torch.device("cuda")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def split_batch(task: Task, batch: Any) -> tuple[Tensor, Tensor]:
    """`(x, y)` and `{"image": x, "label": y}` are both what data sets commonly give."""
    if task.prepare_batch is not None:
        return task.prepare_batch(batch)
    if isinstance(batch, Mapping):
        try:
            return batch["image"], batch["label"]
        except KeyError as missing:
            raise TaskFailed(
                f"a batch has no key {missing}: it has {', '.join(map(str, batch))}",
                hint="give Task(prepare_batch=...) that returns (input, target)",
            ) from None
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise TaskFailed(
        f"a batch is a {type(batch).__name__}, not (input, target)",
        hint="give Task(prepare_batch=...) that returns (input, target)",
    )


def train_one_round(
    task: Task, model: nn.Module, optimizer: Optimizer, device: torch.device, progress: Progress
) -> None:
    model.train()
    if task.train_round is not None:
        task.train_round(model, optimizer, device)
        return
    total = task.epochs * len(task.train_data) if isinstance(task.train_data, Sized) else 0
    done = 0
    for _ in range(task.epochs):
        for batch in task.train_data:
            x, y = split_batch(task, batch)
            optimizer.zero_grad(set_to_none=True)
            loss = task.loss(model(x.to(device)), y.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
            progress(done, max(total, done))
    if done == 0:
        raise TaskFailed("the training data is empty", hint="check the task's `train_data`")


@torch.no_grad()
def evaluate(
    task: Task, model: nn.Module, data: Iterable[Any], device: torch.device
) -> dict[str, float]:
    """The loss and every metric of the task, averaged over samples."""
    model.eval()
    if task.evaluate is not None:
        return {name: float(value) for name, value in task.evaluate(model, device).items()}
    streaming = {name: m for name, m in task.metrics.items() if hasattr(m, "update")}
    for metric in streaming.values():
        metric.reset()
    sums = {"loss": 0.0, **{name: 0.0 for name in task.metrics if name not in streaming}}
    samples = 0
    for batch in data:
        x, y = split_batch(task, batch)
        x, y = x.to(device), y.to(device)
        logits = model(x)
        samples += len(x)
        sums["loss"] += float(task.loss(logits, y)) * len(x)
        for name, metric in task.metrics.items():
            if name in streaming:
                metric.update(logits, y)
            else:
                sums[name] += float(metric(logits, y)) * len(x)
    averages = {name: value / max(samples, 1) for name, value in sums.items()}
    return averages | {name: float(metric.compute()) for name, metric in streaming.items()}


def count_samples(data: Iterable[Any]) -> int | None:
    dataset = getattr(data, "dataset", data)
    return len(dataset) if isinstance(dataset, Sized) else None
