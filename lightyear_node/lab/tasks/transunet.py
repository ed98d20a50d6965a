"""TransUNet: a ResNet, a transformer on its coarsest map, and a decoder that gets the others.

    side    1      1/2       1/4       1/8       1/16
            image ─▶ stem ──▶ stage ──▶ stage ──▶ stage ──▶ transformer
                       │        │         │                      │
            up ◀───── up ◀──── up ◀───── up ◀────── bridge ◀─────┘
             │
            head

The ResNet is that of R50-ViT-B_16: weights of its convolutions are standardized, and channels are
normalized in groups, so that it needs no running statistics.  The decoder has batch normalization.
Images are gray, and the first convolution has one channel, where the original repeats the image
three times.
Nothing is pretrained, since such a file would have to be the same at every site.

The last operation is a convolution with stride 1, so the agreement has its closed form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node.lab.tasks.networks import NORM_MOMENTUM

SIDE = 64
PIXELS_PER_TOKEN = 16
"""Side of the square of the image that one token stands for."""

POSITION_SCALE = 0.02
"""Standard deviation of the initial position embeddings, as in ViT.  Not zero as in R50-ViT-B_16:
that file is pretrained, and a tensor that starts at zero has no scale for the guard."""

STANDARDIZATION_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class TransUNetSize:
    """Widths and depths.  The stages of the ResNet have 4, 8 and 16 times the stem's channels."""

    stem: int
    units: tuple[int, int, int]
    """Bottleneck units of each stage."""
    groups: int
    """Groups of channels that are normalized together."""
    hidden: int
    layers: int
    heads: int
    mlp: int
    """Transformer: width of a token, number of blocks, attention heads, width of the MLP."""
    bridge: int
    """Channels of the map into which the tokens are turned back."""
    decoder: tuple[int, int, int, int]
    """Channels at 1/8, 1/4, 1/2 and the full resolution."""
    norm_momentum: float
    """Momentum of the decoder's running statistics."""
    dropout: float = 0.1


R50_VIT_B16 = TransUNetSize(
    stem=64,
    units=(3, 4, 9),
    groups=32,
    hidden=768,
    layers=12,
    heads=12,
    mlp=3072,
    bridge=512,
    decoder=(256, 128, 64, 16),
    norm_momentum=0.1,
)
SMALL = TransUNetSize(
    stem=32,
    units=(2, 2, 2),
    groups=16,
    hidden=256,
    layers=4,
    heads=8,
    mlp=1024,
    bridge=256,
    decoder=(128, 64, 32, 16),
    norm_momentum=NORM_MOMENTUM,
)


class TransUNet(nn.Module):
    """Gray images of `side` × `side` to logits of the same resolution, (n, classes, side, side)."""

    def __init__(
        self, size: TransUNetSize = R50_VIT_B16, classes: int = 2, side: int = SIDE
    ) -> None:
        super().__init__()
        if side % PIXELS_PER_TOKEN:
            raise ValueError(f"a side of {side} is not a multiple of {PIXELS_PER_TOKEN}")
        self.resnet = GroupNormResNet(size)
        self.transformer = TokenTransformer(size, 16 * size.stem, side // PIXELS_PER_TOKEN)
        self.bridge = nn.Sequential(*_normalized(size.hidden, size.bridge, size))
        skips = (8 * size.stem, 4 * size.stem, size.stem, 0)
        inputs = (size.bridge, *size.decoder[:-1])
        self.decoder = nn.ModuleList(
            UpsamplingBlock(coarse, skip, fine, size)
            for coarse, skip, fine in zip(inputs, skips, size.decoder, strict=True)
        )
        self.head = nn.Conv2d(size.decoder[-1], classes, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        *fine_maps, coarsest = self.resnet(x)
        deep: Tensor = self.bridge(self.transformer(coarsest))
        for block in self.decoder:
            deep = block(deep, fine_maps.pop() if fine_maps else None)
        logits: Tensor = self.head(deep)
        return logits


def transunet(side: int = SIDE) -> TransUNet:
    """The paper's network: ResNet-50 and ViT-B; 105,131,554 parameters at 64 × 64."""
    return TransUNet(R50_VIT_B16, side=side)


def small_transunet(side: int = SIDE) -> TransUNet:
    """The same structure for a CPU; 5,715,778 parameters at 64 × 64."""
    return TransUNet(SMALL, side=side)


class StandardizedConv2d(nn.Conv2d):
    """A convolution without bias whose filters are scaled to mean 0 and variance 1."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) * torch.rsqrt(variance + STANDARDIZATION_EPSILON)
        return functional.conv2d(x, weight, None, self.stride, self.padding)


class BottleneckUnit(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, groups: int, stride: int = 1) -> None:
        super().__init__()
        narrow = outputs // 4
        self.body = nn.Sequential(
            StandardizedConv2d(inputs, narrow, 1),
            nn.GroupNorm(groups, narrow),
            nn.ReLU(inplace=True),
            StandardizedConv2d(narrow, narrow, 3, stride),
            nn.GroupNorm(groups, narrow),
            nn.ReLU(inplace=True),
            StandardizedConv2d(narrow, outputs, 1),
            nn.GroupNorm(groups, outputs),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(
                StandardizedConv2d(inputs, outputs, 1, stride),
                nn.GroupNorm(outputs, outputs),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class GroupNormResNet(nn.Module):
    """Stem and three stages; returns their maps at 1/2, 1/4, 1/8 and 1/16 of the resolution."""

    def __init__(self, size: TransUNetSize) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            StandardizedConv2d(1, size.stem, 7, stride=2),
            nn.GroupNorm(size.groups, size.stem),
            nn.ReLU(inplace=True),
        )
        self.stages = nn.ModuleList()
        inputs = size.stem
        for level, count in enumerate(size.units):
            outputs = size.stem * 4 * 2**level
            first = BottleneckUnit(inputs, outputs, size.groups, stride=2 if level else 1)
            rest = [BottleneckUnit(outputs, outputs, size.groups) for _ in range(count - 1)]
            self.stages.append(nn.Sequential(first, *rest))
            inputs = outputs

    def forward(self, x: Tensor) -> list[Tensor]:
        maps: list[Tensor] = [self.stem(x)]
        deep = functional.max_pool2d(maps[0], 3, stride=2, padding=1)
        for stage in self.stages:
            deep = stage(deep)
            maps.append(deep)
        return maps


class SelfAttention(nn.Module):
    """Multi-head attention of tokens, (n, tokens, hidden), to each other."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        split = self.query_key_value(x).unflatten(2, (3, self.heads, -1))  # (n, t, 3, heads, d)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # (n, heads, t, d) each
        weights = (query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5).softmax(dim=-1)
        out: Tensor = self.out((weights @ value).transpose(1, 2).flatten(2))
        return out


class TransformerBlock(nn.Module):
    """Attention and an MLP, each with its normalization before and a shortcut beside it."""

    def __init__(self, size: TransUNetSize) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.LayerNorm(size.hidden, eps=1e-6), SelfAttention(size.hidden, size.heads)
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(size.hidden, eps=1e-6),
            nn.Linear(size.hidden, size.mlp),
            nn.GELU(),
            nn.Dropout(size.dropout),
            nn.Linear(size.mlp, size.hidden),
            nn.Dropout(size.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        out: Tensor = x + self.mlp(x)
        return out


class TokenTransformer(nn.Module):
    """Every place of a map becomes a token; the result is a map of the same resolution."""

    def __init__(self, size: TransUNetSize, channels: int, side: int) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(channels, size.hidden, 1)
        self.position = nn.Parameter(POSITION_SCALE * torch.randn(1, side * side, size.hidden))
        self.dropout = nn.Dropout(size.dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.hidden, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embedding(x).flatten(2).transpose(1, 2) + self.position  # (n, t, hidden)
        tokens = self.norm(self.blocks(self.dropout(tokens)))
        out: Tensor = tokens.transpose(1, 2).unflatten(2, x.shape[2:])
        return out


class UpsamplingBlock(nn.Module):
    """Doubles the resolution, appends the ResNet's map of that resolution, and convolves twice."""

    def __init__(self, coarse: int, skip: int, fine: int, size: TransUNetSize) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            *_normalized(coarse + skip, fine, size), *_normalized(fine, fine, size)
        )

    def forward(self, x: Tensor, skip: Tensor | None) -> Tensor:
        x = functional.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)
        out: Tensor = self.convolutions(x if skip is None else torch.cat([x, skip], dim=1))
        return out


def _normalized(inputs: int, outputs: int, size: TransUNetSize) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs, momentum=size.norm_momentum),
        nn.ReLU(inplace=True),
    ]
