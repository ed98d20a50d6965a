"""Which hooks are registered on a torch module."""

from __future__ import annotations

from torch import nn


def has_forward_hooks(model: nn.Module) -> bool:
    """Whether a module or one of its parts has a forward hook; torch has no public accessor."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
