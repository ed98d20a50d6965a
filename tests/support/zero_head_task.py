"""A small vision transformer on digits whose final layer starts at exactly zero."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightyear_node import Task

PATCHES, PATCH_PIXELS, WIDTH, CLASSES = 16, 4, 32, 10


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH_PIXELS, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(1, PATCHES + 1, WIDTH))
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        count = len(x)
        patches = x.reshape(count, 4, 2, 4, 2).transpose(2, 3).reshape(count, PATCHES, PATCH_PIXELS)
        tokens = torch.cat([self.token.expand(count, -1, -1), self.patch(patches)], dim=1)
        logits: Tensor = self.head(self.norm(self.blocks(tokens + self.position))[:, 0])
        return logits


def build(
    site_index: int = 0, site_count: int = 4, seed: int = 0, lr: float = 1e-3, epochs: int = 1
) -> Task:
    data = load_digits()
    generator = torch.Generator().manual_seed(seed)
    mine = torch.randperm(len(data.target), generator=generator)[site_index::site_count]
    x, y = torch.tensor(data.data, dtype=torch.float32)[mine] / 16, torch.tensor(data.target)[mine]
    train, val = len(mine) // 2, 3 * len(mine) // 4
    parts = [
        TensorDataset(x[rows], y[rows])
        for rows in (slice(0, train), slice(train, val), slice(val, None))
    ]
    return Task(
        model=Transformer,
        loss=functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr),
        train_data=DataLoader(parts[0], 16, shuffle=True),
        val_data=DataLoader(parts[1], 256),
        test_data=DataLoader(parts[2], 256),
        metrics={"accuracy": lambda z, y: float((z.argmax(1) == y).float().mean())},
        epochs=epochs,
    )
