"""The key of a training: SHA-256 over everything that determines what it writes.

Training is a function of files: the same code, task, data, site, seed, round, model and training
state give the same bytes.  `site_inputs` are equal for all rounds of a site, `machine_inputs` for a
process, `package_inputs` for an experiment; `training_key` adds what a round begins with.

What cannot be named is not keyed, and `is_keyed` is false for it: a user's own task may read other
modules and files or keep a state between rounds, and a user's own attack sees the other sites'
tasks and may change their data.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import lightyear_node
from lightyear_node.lab.malfunctions import ATTACKS
from lightyear_node.lab.simulation_records import SimulationSpec
from lightyear_node.lab.tasks import BUILT_IN, BuiltIn
from lightyear_node.types import Digest, PeerName

FORMAT = 1
"""Increase it when the meaning of an input or the content of an entry changes."""
PACKAGES = ("torch", "numpy", "safetensors", "scikit-learn", "monai", "pillow")
"""Their code trains, or holds or decodes data of the built-in tasks."""

Inputs = Mapping[str, Any]
"""Plain values, as in JSON."""


def training_key(
    inputs: Inputs,
    *,
    round: int,
    base: Digest,
    carry: Digest | None,
    proximal: float,
    personal: float,
    shadow: bool,
    device: str,
    measure: bool,
) -> Digest:
    """The key of one round of training.

    `base` is the digest of the model that it begins with, `carry` that of the training state.
    `proximal` and `personal` are the strengths that the rule adds to training.  An entry that was
    measured has metrics, and evaluation advances the random generator, so `measure` is keyed, too.
    """
    plain = {
        "format": FORMAT,
        "inputs": dict(inputs),
        "round": round,
        "base": base,
        "carry": carry,
        "proximal": proximal,
        "personal": personal,
        "shadow": shadow,
        "device": device,
        "measure": measure,
    }
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return Digest(hashlib.sha256(text.encode()).hexdigest())


def is_keyed(spec: SimulationSpec, data: Mapping[str, str]) -> bool:
    """Whether all inputs of this federation's training are known.

    `data` holds the digests of the prepared data files by path.
    """
    task = _built_in(spec)
    if task is None or isinstance(spec.task.args, tuple) or "data" in spec.task.args:
        return False
    if not data.keys() >= set(task.reads(spec.task.args)):
        return False
    return all(one.built_in or one.kind in ATTACKS for one in spec.malfunctions.values())


def site_inputs(
    spec: SimulationSpec, site: PeerName, data: Mapping[str, str], success: Inputs | None = None
) -> dict[str, Any]:
    """What determines a site's training in every round, for a federation that `is_keyed`.

    Rule and malfunctions are no part of it: they act on what was trained.  `success` names the
    attack whose success is one of the site's metrics.
    """
    task = _built_in(spec)
    assert task is not None
    assert not isinstance(spec.task.args, tuple)
    names = sorted(spec.sites)
    return {
        "task": spec.task.entry,
        "args": dict(spec.task.args),
        "data": {file: data[file] for file in task.reads(spec.task.args)},
        "partition": spec.partition.model_dump(mode="json") if spec.partition else None,
        "site": site,
        "index": names.index(site),
        "count": len(names),
        "seed": spec.seed,
        "exchange": spec.exchange.selection(),
        "success": success,
    }


def package_inputs() -> dict[str, Any]:
    """Code, versions and machine: other processors round differently.  Loads no torch."""
    return {
        "code": _code_digest(),
        "python": platform.python_version(),
        "machine": [platform.node(), platform.machine(), platform.system()],
        "versions": {package: _version(package) for package in PACKAGES},
    }


def machine_inputs() -> dict[str, Any]:
    """Settings of torch in this process."""
    import torch

    return {
        "torch": torch.__config__.show(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "flushes": not bool(torch.tensor(1e-30) * 1e-10),
    }


def _built_in(spec: SimulationSpec) -> BuiltIn | None:
    return next((task for task in BUILT_IN.values() if task.entry == spec.task.entry), None)


def _code_digest() -> str:
    """Digest of the package's modules: a version may be edited without a new number."""
    folder = Path(lightyear_node.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
