"""Small synthetic tasks, one for each kind of loss that users train with.

All sites see the same relation between inputs and targets.  With `shift` each site's inputs have
another mean, so that the sites differ as hospitals do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightyear_node import Task

FEATURES = 8
PIXELS = 12
TEST_SAMPLES = 400
RAW_MEAN, RAW_DEVIATION = 3000.0, 500.0
"""Targets as a laboratory would write them, for example in grams."""


@dataclass(frozen=True)
class Problem:
    """How targets are made of a noisy score (n, 4) and what is minimised on them."""

    targets: Callable[[Tensor, torch.Generator], Any]
    loss: Callable[[Any, Any], Tensor]
    outputs: int = 1
    rate: float = 3e-3


def cox_loss(risk: Tensor, target: Tensor) -> Tensor:
    """Negative log partial likelihood over a batch; the columns of `target` are time and event."""
    time, event = target[:, 0], target[:, 1]
    order = torch.argsort(time, descending=True)
    risk, event = risk.flatten()[order], event[order]
    at_risk = torch.logcumsumexp(risk, 0)
    return -((risk - at_risk) * event).sum() / event.sum().clamp(min=1)


def info_nce(embedding: Tensor, views: Tensor) -> Tensor:
    """Each row should be nearest to the embedding of its own second view, given as the target."""
    similarity = functional.normalize(embedding, dim=1) @ functional.normalize(views, dim=1).T
    return functional.cross_entropy(similarity / 0.2, torch.arange(len(embedding)))


def dice_minus_one(logits: Tensor, target: dict[str, Tensor]) -> Tensor:
    """Between -1 (perfect) and 0; the masks are in a dictionary."""
    found, mask = torch.sigmoid(logits), target["mask"]
    shared = (found * mask).sum(1)
    return -((2 * shared + 1e-3) / (found.sum(1) + mask.sum(1) + 1e-3)).mean()


def gaussian_nll(output: Tensor, target: Tensor) -> Tensor:
    """Negative log likelihood of a normal distribution: not bounded below."""
    mean, log_variance = output[:, :1], output[:, 1:]
    return ((target - mean) ** 2 / log_variance.exp() + log_variance).mean() / 2


def pair_loss(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Two targets in a tuple: a value and a rank."""
    value, other = target
    return functional.mse_loss(output[:, :1], value) + functional.l1_loss(output[:, 1:], other)


def focal(logits: Tensor, target: Tensor) -> Tensor:
    loss = functional.cross_entropy(logits, target, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def one_minus_correlation(output: Tensor, target: Tensor) -> Tensor:
    """Not a number for a constant output."""
    left, right = (output - output.mean()).flatten(), (target - target.mean()).flatten()
    return 1 - functional.cosine_similarity(left, right, dim=0, eps=0)


def _survival(score: Tensor, generator: torch.Generator) -> Tensor:
    time = torch.empty(len(score), 1).exponential_(generator=generator) * torch.exp(-score[:, :1])
    censored = torch.empty(len(score), 1).exponential_(generator=generator) * 2
    return torch.cat([torch.minimum(time, censored), (time <= censored).float()], 1)


def _views(score: Tensor, generator: torch.Generator) -> Tensor:
    return score + 0.3 * torch.randn(score.shape, generator=generator)


def _raw(score: Tensor, _: torch.Generator) -> Tensor:
    return RAW_MEAN + RAW_DEVIATION * score[:, :1]


def _mask(score: Tensor, _: torch.Generator) -> dict[str, Tensor]:
    places = torch.linspace(-2, 2, PIXELS)
    return {"mask": ((places - score[:, :1]).abs() < 0.8).float()}


PROBLEMS = {
    "cross_entropy": Problem(lambda s, _: s.argmax(1), functional.cross_entropy, 4),
    "focal": Problem(lambda s, _: s.argmax(1), focal, 4),
    "binary": Problem(
        lambda s, _: (s[:, :1] > 0).float(), functional.binary_cross_entropy_with_logits
    ),
    "multi_label": Problem(
        lambda s, _: (s > 0.3).float(), functional.binary_cross_entropy_with_logits, 4
    ),
    "mse": Problem(lambda s, _: s[:, :1], functional.mse_loss),
    "mse_raw": Problem(_raw, functional.mse_loss, rate=0.03),
    "mae": Problem(lambda s, _: s[:, :1], functional.l1_loss),
    "mae_raw": Problem(_raw, functional.l1_loss, rate=0.03),
    "fraction": Problem(lambda s, _: torch.sigmoid(s[:, :1]), functional.mse_loss),
    "brier": Problem(lambda s, _: (s[:, :1] > 0).float(), functional.mse_loss),
    "cox": Problem(_survival, cox_loss),
    "info_nce": Problem(_views, info_nce, 4),
    "dice": Problem(_mask, dice_minus_one, PIXELS),
    "gaussian_nll": Problem(lambda s, _: s[:, :1], gaussian_nll, 2),
    "pair": Problem(lambda s, _: (s[:, :1], s[:, 1:2]), pair_loss, 2),
    "correlation": Problem(lambda s, _: s[:, :1], one_minus_correlation),
}


class _Nested(Dataset[Any]):
    """Inputs, and targets that may be a dictionary or a tuple of tensors."""

    def __init__(self, x: Tensor, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.y, dict):
            return self.x[index], {key: value[index] for key, value in self.y.items()}
        return self.x[index], tuple(value[index] for value in self.y)


def build(
    kind: str = "mse",
    site_index: int = 0,
    seed: int = 0,
    samples: int = 240,
    noise: float = 0.5,
    shift: float = 0.0,
    rate: float | None = None,
) -> Task:
    problem = PROBLEMS[kind]
    common = torch.Generator().manual_seed(seed)
    teacher = torch.randn(FEATURES, 4, generator=common) / FEATURES**0.5
    bend = torch.randn(FEATURES, 4, generator=common) / FEATURES**0.5
    generator = torch.Generator().manual_seed(1000 * seed + site_index + 1)
    centre = shift * torch.randn(FEATURES, generator=generator)

    def dataset(count: int) -> Dataset[Any]:
        x = centre + torch.randn(count, FEATURES, generator=generator)
        score = x @ teacher + torch.sin(2 * x @ bend)
        score = score + noise * torch.randn(score.shape, generator=generator)
        y = problem.targets(score, generator)
        return TensorDataset(x, y) if isinstance(y, Tensor) else _Nested(x, y)

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(),
            nn.Linear(32, problem.outputs),
        )  # fmt: skip

    train = DataLoader(dataset(samples), 20, shuffle=True)
    validation = DataLoader(dataset(samples // 2), 40)
    test = DataLoader(dataset(TEST_SAMPLES), 40)

    def train_round(model: nn.Module, optimizer: torch.optim.Optimizer, device: Any) -> None:
        for x, y in train:
            optimizer.zero_grad()
            torch.autograd.backward(problem.loss(model(x), y))
            optimizer.step()

    def evaluate(model: nn.Module, device: Any) -> dict[str, float]:
        with torch.no_grad():
            return {"loss": sum(float(problem.loss(model(x), y)) for x, y in test) / len(test)}

    return Task(
        model=network,
        loss=problem.loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, rate or problem.rate),
        train_data=train,
        val_data=validation,
        train_round=train_round,
        evaluate=evaluate,
    )
