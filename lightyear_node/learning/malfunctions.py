"""Broken and hostile messages, for experiments and tests only.

A malfunction changes what a site sends, one copy per round and the same to every peer; the site
itself goes on training, judging and merging as an honest one would.

    ana       θ · (1 + s/100 · N(0, 1)); with sigma, θ + σ · N(0, 1)   the paper's noise attack
    sfa       −α θ                                                     its sign-flipping attack
    random    a freshly initialised network                            its failed training
    dynamic   one of these three, drawn anew each round
    nan, head-flip, head-scale                                         ours
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from enum import StrEnum

import torch
from torch import Tensor, nn

from lightyear_node.learning.weights import Layout


class Malfunction(StrEnum):
    ANA = "ana"
    SFA = "sfa"
    RANDOM = "random"
    DYNAMIC = "dynamic"
    NAN = "nan"
    HEAD_FLIP = "head-flip"
    HEAD_SCALE = "head-scale"


ANA_STRENGTH = 120.5
"""Percent; the paper's value for all sets but Camelyon17, which has 1.5."""
HEAD_FACTOR = 100.0


def corrupt(
    kind: Malfunction | str,
    tensors: Mapping[str, Tensor],
    *,
    seed: int,
    round: int = 0,
    strength: float = ANA_STRENGTH,
    sigma: float | None = None,
    alpha: float = 1.0,
    fresh: Callable[[], nn.Module] | nn.Module | None = None,
    head: str | None = None,
) -> dict[str, Tensor]:
    """The message that a site with this malfunction sends instead of `tensors`.

    The same seed and round give the same message.  `fresh` (a factory, or a module whose layers
    can reset themselves) is needed for `random` and `dynamic`; `head`, the name of the final
    layer, for the head's malfunctions.
    """
    kind = Malfunction(kind)
    dice = torch.Generator().manual_seed(_seed(seed, round))
    if kind is Malfunction.DYNAMIC:
        choices = (Malfunction.ANA, Malfunction.SFA, Malfunction.RANDOM)
        kind = choices[int(torch.randint(len(choices), (), generator=dice))]
    match kind:
        case Malfunction.ANA if sigma is not None:
            return {name: t + sigma * _noise(t, dice) for name, t in tensors.items()}
        case Malfunction.ANA:
            return {n: t * (1 + strength / 100 * _noise(t, dice)) for n, t in tensors.items()}
        case Malfunction.SFA:
            return {name: -alpha * t for name, t in tensors.items()}
        case Malfunction.RANDOM:
            return _redrawn(tensors, fresh, int(torch.randint(1 << 62, (), generator=dice)))
        case Malfunction.NAN:
            return {name: torch.full_like(t, torch.nan) for name, t in tensors.items()}
        case Malfunction.HEAD_FLIP:
            return _head_times(tensors, head, -1.0)
        case Malfunction.HEAD_SCALE:
            return _head_times(tensors, head, HEAD_FACTOR)
    raise AssertionError(kind)


def _seed(seed: int, round: int) -> int:
    digest = hashlib.sha256(f"malfunction/{seed}/{round}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _noise(like: Tensor, dice: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=dice).to(like.device, like.dtype)


def _redrawn(
    tensors: Mapping[str, Tensor], fresh: Callable[[], nn.Module] | nn.Module | None, seed: int
) -> dict[str, Tensor]:
    if fresh is None:
        raise ValueError("a random network needs `fresh`: a factory, or a module to reset")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = _reset(fresh) if isinstance(fresh, nn.Module) else fresh()
    state = module.state_dict()
    drawn = {name: state[name].detach().to(t.device) for name, t in tensors.items()}
    Layout.of(tensors).check(drawn)
    return drawn


def _reset(module: nn.Module) -> nn.Module:
    """A copy with every layer initialised anew."""
    module = copy.deepcopy(module)
    for name, layer in module.named_modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
        elif any(True for _ in layer.parameters(recurse=False)):
            raise ValueError(f'layer "{name}" cannot reset itself: pass a factory as `fresh`')
    return module


def _head_times(
    tensors: Mapping[str, Tensor], head: str | None, factor: float
) -> dict[str, Tensor]:
    if head is None or not any(name.startswith(f"{head}.") for name in tensors):
        raise ValueError("a malfunction of the head needs the name of the final layer")
    return {n: t * factor if n.startswith(f"{head}.") else t.clone() for n, t in tensors.items()}
