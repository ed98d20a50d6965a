"""Networks of the built-in tasks that need only torch.  All return logits.

The small ones are for large experiments on a CPU: they halve the resolution by strides instead of
pooling, because a convolution costs most at full resolution.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional

CHARACTERS = 62

NORM_MOMENTUM = 0.3
"""Torch's default, 0.1, suits long epochs: after a round of ten batches, a third of the running
statistics would still be those of the untrained network."""


class PaperCNN(nn.Sequential):
    """The paper's network for FEMNIST: 28 × 28 gray, 1,690,046 parameters."""

    def __init__(self, classes: int = CHARACTERS) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(512, classes),
        )


class SmallCNN28(nn.Sequential):
    """The same task at a tenth of the cost: 28 × 28 gray."""

    def __init__(self, classes: int = CHARACTERS) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )


class SmallBatchNormCNN(nn.Sequential):
    """Colour images of any size from 16 × 16 on."""

    def __init__(self, classes: int) -> None:
        super().__init__(
            *_halving(3, 16),
            *_halving(16, 32),
            *_halving(32, 64),
            *_halving(64, 64),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, classes),
        )


class SmallUNet(nn.Module):
    """Gray images with sides divisible by 8, one convolution per level, two classes per pixel.

    Upsampled maps are added to a level's own map, not concatenated: a third cheaper, and the Dice
    differed by −.04 to +.02 on three sets (one site, one seed).
    """

    def __init__(self, classes: int = 2, width: int = 8) -> None:
        super().__init__()
        levels = list(pairwise([width, 2 * width, 4 * width, 8 * width]))
        self.enter = nn.Sequential(*_block(1, width))
        self.down = nn.ModuleList(nn.Sequential(*_halving(fine, deep)) for fine, deep in levels)
        self.narrow = nn.ModuleList(
            nn.Conv2d(deep, fine, 1, bias=False) for fine, deep in reversed(levels)
        )
        self.up = nn.ModuleList(nn.Sequential(*_block(fine, fine)) for fine, _ in reversed(levels))
        self.head = nn.Conv2d(width, classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.enter(x)  # (n, w, h, h)
        # Channels last in memory: faster for narrow convolutions on a CPU.
        # (`memory_format=` cannot be used under `vmap`.)
        maps = [first.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)]
        for down in self.down:
            maps.append(down(maps[-1]))  # (n, 2w, h/2, h/2), (n, 4w, h/4, h/4), …
        deep = maps.pop()
        for narrow, up in zip(self.narrow, self.up, strict=True):
            deep = up(functional.interpolate(narrow(deep), scale_factor=2) + maps.pop())
        logits: Tensor = self.head(deep)  # (n, classes, h, h)
        return logits


class SmallMLP(nn.Sequential):
    """Maps a table's columns to one logit, (n, 1)."""

    def __init__(self, columns: int) -> None:
        super().__init__(
            nn.Linear(columns, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )


def _block(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [
        # Without bias: the normalisation that follows would cancel it.
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs, momentum=NORM_MOMENTUM),
        nn.ReLU(inplace=True),
    ]


def _halving(inputs: int, outputs: int) -> list[nn.Module]:
    return _block(inputs, outputs, stride=2)
