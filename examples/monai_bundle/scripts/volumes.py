"""Synthetic volumes with one bright ball each."""

from __future__ import annotations

import torch
from torch import Tensor


def volumes(count: int, seed: int, sizes: list[int]) -> list[dict[str, Tensor]]:
    """Volumes whose edge lengths are those of `sizes`, in turn, with their masks."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        size = sizes[index % len(sizes)]
        middle = size * (0.3 + 0.4 * torch.rand(3, generator=generator))
        axes = torch.meshgrid(*[torch.arange(float(size))] * 3, indexing="ij")
        distance = torch.stack([axis - at for axis, at in zip(axes, middle, strict=True)]).norm(
            dim=0, keepdim=True
        )
        label = (distance < size / 4).float()
        noise = 0.3 * torch.randn(label.shape, generator=generator)
        found.append({"image": label + noise, "label": label})
    return found
