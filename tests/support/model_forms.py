"""Small tasks whose models, batches and labels have every supported form; each can be learned."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from monai.data.meta_tensor import MetaTensor
from monai.losses.dice import DiceCELoss
from monai.metrics.meandice import DiceMetric
from torch import Tensor, nn
from torch.nn import functional

SAMPLES = 96


class TwoHeads(nn.Module):
    """Two predictions in a dictionary: a class and a size."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 16)
        self.kind = nn.Linear(16, 3)
        self.size = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.trunk(x).relu()
        return {"kind": self.kind(features), "size": self.size(features)}


class ModelOutput(OrderedDict[str, Any]):
    """A mapping whose entries are attributes too, as in Hugging Face's library."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Classifier(nn.Module):
    """Takes tokens by name and returns its loss with the logits, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 16)
        self.classifier = nn.Linear(16, 3)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> ModelOutput:
        words = self.words(input_ids) * attention_mask.unsqueeze(-1)
        logits = self.classifier(words.sum(1).tanh())
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return ModelOutput(loss=loss, logits=logits, attentions=(words,))


class Segmenter(nn.Module):
    """Segments signals, images or volumes."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
        self.body = conv(1, 8, 3, padding=1)
        self.head = conv(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x).relu())
        return logits


def two_heads() -> dict[str, Any]:
    x, y = _samples()
    batches = [
        (part, {"kind": kind, "size": part[:, 3:]})
        for part, kind in zip(torch.split(x, 16), torch.split(y, 16), strict=True)
    ]

    def loss(output: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> Tensor:
        kind = functional.cross_entropy(output["kind"], target["kind"])
        return kind + functional.mse_loss(output["size"], target["size"])

    def right(output: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> Tensor:
        return (output["kind"].argmax(1) == target["kind"]).float().mean()

    return {"model": TwoHeads, "loss": loss, "metrics": {"right": right}, **_data(batches)}


def hugging_face() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    labels = torch.arange(SAMPLES) % 3
    tokens = labels.unsqueeze(1) * 4 + torch.randint(4, (SAMPLES, 6), generator=generator)
    mask = (torch.arange(6) < 4).long().expand(SAMPLES, 6)
    batches = [
        {
            "input_ids": tokens[rows],
            "attention_mask": mask[rows],
            "labels": labels[rows],
            "name": ["text"] * 16,
        }
        for rows in torch.split(torch.randperm(SAMPLES, generator=generator), 16)
    ]
    return {
        "model": Classifier,
        "loss": lambda output, target: output.loss,
        "metrics": {"right": lambda logits, y: (logits.argmax(1) == y).float().mean()},
        **_data(batches),
    }


def segmentation(dimensions: int) -> dict[str, Any]:
    """MONAI's dictionaries of MetaTensors, its loss and its metric."""
    generator = torch.Generator().manual_seed(6)
    shape = (16, 1, *(6,) * dimensions)
    batches = []
    for _ in range(4):
        mask = (torch.rand(shape, generator=generator) > 0.7).float()
        image = mask + 0.3 * torch.randn(shape, generator=generator)
        batches.append({"image": MetaTensor(image), "label": MetaTensor(mask)})

    def one_hot(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return output.argmax(1, keepdim=True), target

    return {
        "model": lambda: Segmenter(dimensions),
        "loss": DiceCELoss(to_onehot_y=True, softmax=True),
        "metrics": {"right": DiceMetric(include_background=False, num_classes=2)},
        "metric_inputs": one_hot,
        **_data(batches),
    }


FORMS: dict[str, Callable[[], dict[str, Any]]] = {
    "two heads and dictionary labels": two_heads,
    "Hugging Face": hugging_face,
    "MONAI signals": lambda: segmentation(1),
    "MONAI images": lambda: segmentation(2),
    "MONAI volumes": lambda: segmentation(3),
}
"""Settings of `tests.support.tiny_site.task`; the metric `right` rises to 1 with training."""


def _samples() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(5))
    return x, x[:, :3].argmax(1)


def _data(batches: list[Any]) -> dict[str, Any]:
    return {
        "train_data": batches,
        "val_data": batches,
        "samples": SAMPLES,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, 1e-2),
        "epochs": 8,
    }
