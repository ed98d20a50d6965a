"""Broken and hostile messages, for experiments and tests only.

A malfunction changes what a site sends, one copy per round and the same to every peer; the site
itself goes on training, judging and merging as an honest one would.

    kind          message                                        scale, its default
    ana           θ · (1 + s/100 · N(0, 1))                      s = 120.5      the paper's noise
    noise         θ + σ · N(0, 1), as its main text writes it    σ = 0.1
    sfa           −α θ                                           α = 1          sign-flipping
    random        a freshly initialised network                  –              failed training
    dynamic       one of ana, sfa, random, drawn every round     –
    nan           not a number, everywhere                       –              ours, from here on
    head-flip     the final layer times −1                       –
    head-scale    the final layer times a factor                 100
    bias-shift    one class's bias raised                        10
    label-flip    trained on flipped labels                      –
    stale         the update of some rounds ago                  3 rounds
    free-rider    the model that the round began with            –

The last three are more than a change of weights: the worker makes them.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from enum import StrEnum

import torch
from torch import Tensor, nn

from lightyear_node.learning.weights import Layout, tied_in


class Malfunction(StrEnum):
    ANA = "ana"
    SFA = "sfa"
    RANDOM = "random"
    DYNAMIC = "dynamic"
    NOISE = "noise"
    NAN = "nan"
    HEAD_FLIP = "head-flip"
    HEAD_SCALE = "head-scale"
    BIAS_SHIFT = "bias-shift"
    LABEL_FLIP = "label-flip"
    STALE = "stale"
    FREE_RIDER = "free-rider"


ANA_STRENGTH = 120.5
"""Percent; the paper's value for all sets but Camelyon17, which has 1.5."""
NOISE_SIGMA = 0.1
HEAD_FACTOR = 100.0
BIAS_SHIFT = 10.0
"""In units of a logit: that class is then preferred e¹⁰ times."""
STALE_ROUNDS = 3


def corrupt(
    kind: Malfunction | str,
    tensors: Mapping[str, Tensor],
    *,
    seed: int,
    round: int = 0,
    scale: float | None = None,
    fresh: Callable[[], nn.Module] | nn.Module | None = None,
    head: str | None = None,
) -> dict[str, Tensor]:
    """The message that a site with this malfunction sends instead of `tensors`.

    The same seed and round give the same message.  `scale` is the kind's own.  `fresh` (a factory,
    or a module whose layers can reset themselves) is needed for `random` and `dynamic`; `head`, the
    name of the final layer, for the head's malfunctions.
    """
    kind = Malfunction(kind)
    dice = torch.Generator().manual_seed(_seed(seed, round))
    if kind is Malfunction.DYNAMIC:
        choices = (Malfunction.ANA, Malfunction.SFA, Malfunction.RANDOM)
        kind = choices[int(torch.randint(len(choices), (), generator=dice))]
    match kind:
        case Malfunction.ANA:
            share = _or(scale, ANA_STRENGTH) / 100
            return {name: t * (1 + share * _noise(t, dice)) for name, t in tensors.items()}
        case Malfunction.NOISE:
            sigma = _or(scale, NOISE_SIGMA)
            return {name: t + sigma * _noise(t, dice) for name, t in tensors.items()}
        case Malfunction.SFA:
            return {name: -_or(scale, 1.0) * t for name, t in tensors.items()}
        case Malfunction.RANDOM:
            return _redrawn(tensors, fresh, int(torch.randint(1 << 62, (), generator=dice)))
        case Malfunction.NAN:
            return {name: torch.full_like(t, torch.nan) for name, t in tensors.items()}
        case Malfunction.HEAD_FLIP:
            return _head_times(tensors, head, -1.0)
        case Malfunction.HEAD_SCALE:
            return _head_times(tensors, head, _or(scale, HEAD_FACTOR))
        case Malfunction.BIAS_SHIFT:
            return _bias_shifted(tensors, head, _or(scale, BIAS_SHIFT), dice)
    raise ValueError(f"{kind} is more than a change of weights: the worker makes it")


def _or(given: float | None, default: float) -> float:
    return default if given is None else given


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
    ours = set(_of_head(tensors, head).values())
    return {n: t * factor if n in ours else t.clone() for n, t in tensors.items()}


def _bias_shifted(
    tensors: Mapping[str, Tensor], head: str | None, shift: float, dice: torch.Generator
) -> dict[str, Tensor]:
    """One class's only: the softmax does not see a shift that all classes share."""
    bias = _of_head(tensors, head).get(f"{head}.bias")
    if bias is None:
        raise ValueError("a shifted bias needs a final layer that has one")
    shifted = {name: tensor.clone() for name, tensor in tensors.items()}
    shifted[bias][int(torch.randint(len(shifted[bias]), (), generator=dice))] += shift
    return shifted


def _of_head(tensors: Mapping[str, Tensor], head: str | None) -> dict[str, str]:
    """The final layer's tensors by the names it has for them; tied ones travel under others."""
    names = {name: name for name in tensors} | dict(tied_in(tensors))
    found = {
        own: name
        for own, name in names.items()
        if head is not None and own.startswith(f"{head}.") and name in tensors
    }
    if not found:
        raise ValueError("a malfunction of the head needs the name of the final layer")
    return found
