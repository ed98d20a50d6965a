"""Larger networks from MONAI, among them two of the paper's.  All return logits.

MONAI is optional and takes seconds to import, so it is loaded only when a network is made.
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from lightyear_node.errors import ConfigError


def densenet121(classes: int = 2) -> nn.Module:
    """Colour images; 6,955,906 parameters for two classes."""
    return _made("DenseNet121", spatial_dims=2, in_channels=3, out_channels=classes)


def efficientnet_b0(classes: int = 8) -> nn.Module:
    """Colour images, not pretrained: a pretrained file would have to be the same at every site."""
    return _made(
        "EfficientNetBN",
        model_name="efficientnet-b0",
        pretrained=False,
        spatial_dims=2,
        in_channels=3,
        num_classes=classes,
        # MONAI's default momentum, 0.01, is too slow for rounds of a few batches: evaluation
        # would use outdated statistics.
        norm=("batch", {"eps": 1e-3, "momentum": 0.1}),
    )


def transformer_unet(classes: int = 2, side: int = 64) -> nn.Module:
    """Gray images of `side` × `side`: a small UNETR, without a ResNet.

    One token per 16 × 16 pixels; 3,953,954 parameters.
    """
    return _made(
        "UNETR",
        in_channels=1,
        out_channels=classes,
        img_size=(side, side),
        spatial_dims=2,
        feature_size=8,
        hidden_size=192,
        mlp_dim=384,
        num_heads=6,
        norm_name="batch",
    )


def _made(name: str, **arguments: Any) -> nn.Module:
    try:
        importlib.import_module("einops")  # MONAI imports it late, with a long error
        nets = importlib.import_module("monai.networks.nets")
    except ModuleNotFoundError as problem:
        raise ConfigError(
            f"the network {name} needs the package `{problem.name}`, which is not installed",
            hint="pip install 'lightyear-node[medical]', or use network: small",
        ) from problem
    network: nn.Module = getattr(nets, name)(**arguments)
    return network
