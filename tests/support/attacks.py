"""Malfunctions as a user would write them, for tests that name one."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def negated(update: dict[str, Tensor], context: Any, factor: float = 1.0) -> dict[str, Tensor]:
    return {name: -factor * tensor for name, tensor in update.items()}


def broken(update: dict[str, Tensor], context: Any) -> dict[str, Tensor]:
    raise RuntimeError("the attack is not finished")
