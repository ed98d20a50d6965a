"""A model without the modules that `torch.compile` and data parallelism put around its parts.

They change the names of tensors (`_orig_mod.`, `module.`), which must be the same at every site
whether or not a site compiles its model.
"""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel


def without_wrappers(module: nn.Module) -> nn.Module:
    """The same model with plain names: it shares every parameter and buffer with `module`.

    `module` itself if nothing is wrapped; otherwise modules that hold a wrapped one are copied.
    """
    return _plain(module, {})


def _plain(module: nn.Module, done: dict[int, nn.Module]) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    inner = _unwrapped(module)
    children = {
        name: child if child is None else _plain(child, done)
        for name, child in inner._modules.items()
    }
    if all(child is inner._modules[name] for name, child in children.items()):
        plain = inner
    else:
        # A shallow copy: the dictionaries of parameters and buffers are those of the original.
        plain = copy.copy(inner)
        plain.__dict__["_modules"] = children
    done[id(module)] = plain
    return plain


def _unwrapped(module: nn.Module) -> nn.Module:
    while True:
        compiled = module._modules.get("_orig_mod")
        if compiled is not None:
            module = compiled
        elif isinstance(module, DataParallel | DistributedDataParallel):
            module = module.module
        else:
            return module
