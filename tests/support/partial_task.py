"""A task with a pretrained base of which only a part is trained and exchanged.

The base has learned clean digits.  Every site sees them inverted and with its own contrast, and
trains low-rank adapters (LoRA), a new final layer, or the last block.
"""

from __future__ import annotations

import functools

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightyear_node import Task

PIXELS, WIDTH, CLASSES, RANK = 64, 64, 10, 4
BASE_IMAGES = 600
INCLUDE = {
    "adapters": ("*lora_*",),
    "adapters_and_head": ("*lora_*", "head.*"),
    "head": ("head.*",),
    "last_block": ("third.*", "head.*"),
    "all": ("*",),
}
"""Patterns of `exchange.include`."""


class AdaptedLinear(nn.Linear):
    """W x + B A x, where B starts at exactly zero; names as PEFT writes them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.lora_A = nn.Linear(inputs, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = super().forward(x) + self.lora_B(self.lora_A(x))
        return adapted


class Network(nn.Module):
    def __init__(self, adapted: bool = False) -> None:
        super().__init__()
        layer = AdaptedLinear if adapted else nn.Linear
        self.first = layer(PIXELS, WIDTH)
        self.second = layer(WIDTH, WIDTH)
        self.third = layer(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.third):
            x = functional.relu(layer(x))
        logits: Tensor = self.head(x)
        return logits


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.data, dtype=torch.float32) / 16
    return images[order], torch.tensor(data.target)[order]


@functools.cache
def _base() -> dict[str, Tensor]:
    """Weights that have learned clean digits; the same at every site."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = Network()
        optimizer = torch.optim.Adam(network.parameters(), 2e-3)
        x, y = (part[:BASE_IMAGES] for part in _digits())
        for _ in range(30):
            for rows in torch.split(torch.randperm(len(x)), 50):
                optimizer.zero_grad()
                torch.autograd.backward(functional.cross_entropy(network(x[rows]), y[rows]))
                optimizer.step()
    return {name: value.detach() for name, value in network.state_dict().items()}


def build(
    part: str = "adapters",
    site_index: int = 0,
    site_count: int = 4,
    seed: int = 0,
    lr: float = 3e-3,
    contrast: float = 0.1,
    shade: float = 0.3,
    epochs: int = 1,
    zero_head: bool = False,
    adam: bool = True,
) -> Task:
    def network() -> nn.Module:
        made = Network(adapted=part.startswith("adapters"))
        kept = {n: v for n, v in _base().items() if part == "adapters" or "head" not in n}
        made.load_state_dict(kept, strict=False)
        if zero_head and part != "adapters":
            nn.init.zeros_(made.head.weight)
            nn.init.zeros_(made.head.bias)
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(
                part == "all"
                or ("lora_" in name and part.startswith("adapters"))
                or (name.startswith("head") and part != "adapters")
                or (name.startswith("third") and part == "last_block")
            )
        return made

    x, y = (values[BASE_IMAGES:] for values in _digits())
    generator = torch.Generator().manual_seed(seed)
    mine = torch.randperm(len(x), generator=generator)[site_index::site_count]
    images = shade + (1 - shade) * x[mine] * (1 - contrast * site_index)
    train, val = len(mine) // 2, 3 * len(mine) // 4
    parts = [
        TensorDataset(images[rows], y[mine][rows])
        for rows in (slice(0, train), slice(train, val), slice(val, None))
    ]
    return Task(
        model=network,
        loss=functional.cross_entropy,
        optimizer=lambda parameters: (
            torch.optim.Adam(parameters, lr) if adam else torch.optim.SGD(parameters, lr)
        ),
        train_data=DataLoader(parts[0], 16, shuffle=True),
        val_data=DataLoader(parts[1], 256),
        test_data=DataLoader(parts[2], 256),
        metrics={"accuracy": lambda z, y: float((z.argmax(1) == y).float().mean())},
        epochs=epochs,
    )
