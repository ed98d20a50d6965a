"""Built-in tasks, written as a user would write one.

This module lists them and finds their data.  It imports neither torch nor numpy; a task's module is
imported only by the process that trains.

Modules:

    prepared          prepared data sets: one npz file with client and split per row
    networks          networks that need only torch
    medical_networks  larger networks, from MONAI
    transunet         the paper's network for segmentation, in two sizes
    losses            losses and metrics
    augmentation      random changes of training images
    digits            handwritten digits; needs no download
    femnist           handwritten characters, 62 classes
    pcam              lymph-node patches (PatchCamelyon)
    isic              skin lesions (Fed-ISIC2019)
    hc18              fetal heads in ultrasound images
    cxr_lungs         lungs in chest X-rays
    heart             heart disease from clinical values
    retina            vessels of the retina
    options           the `build()` options that all tasks share
    recipes           from samples and options to a `Task`: the common part
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightyear_node.errors import ConfigError

DATA_VARIABLE = "LIGHTYEAR_DATA"
"""Environment variable: directory of the prepared data sets, unless a task's argument `data`
names it."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """One built-in task and the size of the paper's experiment with it."""

    name: str
    entry: str
    clients: int
    rounds: int
    metric: str
    """The metric that is reported: `accuracy` or `dice`."""
    paper: str | None = None
    """The data set's name in the paper's tables; None if it is not in the paper."""
    files: tuple[str, ...] = ()
    """Files read by default, relative to the data directory."""
    full_files: tuple[str, ...] = ()
    """Files read instead with the argument `full`."""

    def reads(self, args: Mapping[str, Any]) -> tuple[str, ...]:
        return self.full_files if self.full_files and args.get("full") else self.files


_ALL = (
    BuiltIn("digits", "lightyear_node.lab.tasks.digits:build", 5, 8, "accuracy"),
    BuiltIn(
        "femnist",
        "lightyear_node.lab.tasks.femnist:build",
        8,
        12,
        "accuracy",
        "FEMNIST",
        ("femnist/femnist.npz",),
    ),
    BuiltIn(
        "pcam",
        "lightyear_node.lab.tasks.pcam:build",
        5,
        12,
        "accuracy",
        "Camelyon17",
        ("pcam_patches/pcam_u8_48.npz",),
        ("pcam_patches/pcam_jpeg96.npz",),
    ),
    BuiltIn(
        "isic",
        "lightyear_node.lab.tasks.isic:build",
        6,
        20,
        "accuracy",
        "Isic19",
        ("fed_isic2019/fed_isic2019_u8_64.npz",),
        ("fed_isic2019/fed_isic2019_jpeg84.npz",),
    ),
    BuiltIn(
        "hc18",
        "lightyear_node.lab.tasks.hc18:build",
        5,
        60,
        "dice",
        "Ultrasound",
        ("hc18_fetal/hc18_fetal.npz",),
    ),
    BuiltIn(
        "cxr_lungs",
        "lightyear_node.lab.tasks.cxr_lungs:build",
        5,
        60,
        "dice",
        "XRay",
        ("cxr_lungs/cxr_lungs.npz",),
    ),
    BuiltIn(
        "heart",
        "lightyear_node.lab.tasks.heart:build",
        4,
        12,
        "accuracy",
        None,
        ("heart_disease/heart_disease.npz",),
    ),
    BuiltIn(
        "retina",
        "lightyear_node.lab.tasks.retina:build",
        3,
        60,
        "dice",
        None,
        ("retina_vessels/retina_vessels.npz",),
    ),
)

BUILT_IN: Mapping[str, BuiltIn] = MappingProxyType({task.name: task for task in _ALL})


def data_root(given: str | None = None) -> Path:
    """Return the directory of the prepared data sets: the one given, or the environment's."""
    named = given or os.environ.get(DATA_VARIABLE)
    if not named:
        raise ConfigError("the data directory of this task is not set", hint=_where())
    root = Path(named).expanduser()
    if not root.is_dir():
        raise ConfigError(f"there is no data directory `{named}`", hint=_where())
    return root


def data_file(relative: str, given: str | None = None) -> Path:
    """Return the path of a prepared file; raise if it does not exist."""
    file = data_root(given) / relative
    if not file.is_file():
        raise ConfigError(f"`{relative}` is missing in the data directory", hint=_where())
    return file


def _where() -> str:
    layout = ", ".join(file for task in _ALL for file in task.files)
    return (
        f"set the environment variable {DATA_VARIABLE} or the task's argument `data` to the "
        f"directory that holds these files (each task reads its own): {layout}"
    )
