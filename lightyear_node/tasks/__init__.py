"""Built-in tasks, written exactly as a user would write one; none of them is known to the core.

This file is the list of them and where their data lie.  It loads neither torch nor numpy, so that
the command line can show it at once; a task's module is imported only by whoever trains.
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
"""Names the directory of the prepared data sets where a task's argument `data` does not."""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """One task, with the size of the paper's experiment on it."""

    name: str
    entry: str
    clients: int
    rounds: int
    metric: str
    """`accuracy` or `dice`: what the task's result is called among its metrics."""
    paper: str | None = None
    """The data set's name in the paper's tables; None if the paper does not have it."""
    files: tuple[str, ...] = ()
    """What it reads by default, relative to the data directory."""
    full_files: tuple[str, ...] = ()
    """What it reads in their place with the argument `full`."""

    def reads(self, args: Mapping[str, Any]) -> tuple[str, ...]:
        return self.full_files if self.full_files and args.get("full") else self.files


_ALL = (
    BuiltIn("digits", "lightyear_node.tasks.digits:build", 5, 8, "accuracy"),
    BuiltIn(
        "femnist",
        "lightyear_node.tasks.femnist:build",
        8,
        12,
        "accuracy",
        "FEMNIST",
        ("femnist/femnist.npz",),
    ),
    BuiltIn(
        "pcam",
        "lightyear_node.tasks.pcam:build",
        5,
        12,
        "accuracy",
        "Camelyon17",
        ("pcam_patches/pcam_u8_48.npz",),
        ("pcam_patches/pcam_jpeg96.npz",),
    ),
    BuiltIn(
        "isic",
        "lightyear_node.tasks.isic:build",
        6,
        20,
        "accuracy",
        "Isic19",
        ("fed_isic2019/fed_isic2019_u8_64.npz",),
        ("fed_isic2019/fed_isic2019_jpeg84.npz",),
    ),
    BuiltIn(
        "hc18",
        "lightyear_node.tasks.hc18:build",
        5,
        60,
        "dice",
        "Ultrasound",
        ("hc18_fetal/hc18_fetal.npz",),
    ),
    BuiltIn(
        "cxr_lungs",
        "lightyear_node.tasks.cxr_lungs:build",
        5,
        60,
        "dice",
        "XRay",
        ("cxr_lungs/cxr_lungs.npz",),
    ),
    BuiltIn(
        "heart",
        "lightyear_node.tasks.heart:build",
        4,
        12,
        "accuracy",
        None,
        ("heart_disease/heart_disease.npz",),
    ),
    BuiltIn(
        "retina",
        "lightyear_node.tasks.retina:build",
        3,
        60,
        "dice",
        None,
        ("retina_vessels/retina_vessels.npz",),
    ),
)

BUILT_IN: Mapping[str, BuiltIn] = MappingProxyType({task.name: task for task in _ALL})


def data_root(given: str | None = None) -> Path:
    """The directory of the prepared sets: the one given, else that of the environment."""
    named = given or os.environ.get(DATA_VARIABLE)
    if not named:
        raise ConfigError("this task needs to know where its data are", hint=_where())
    root = Path(named).expanduser()
    if not root.is_dir():
        raise ConfigError(f"there is no data directory `{named}`", hint=_where())
    return root


def data_file(relative: str, given: str | None = None) -> Path:
    """One file of the prepared sets, known to exist."""
    file = data_root(given) / relative
    if not file.is_file():
        raise ConfigError(f"`{relative}` is missing in the data directory", hint=_where())
    return file


def _where() -> str:
    layout = ", ".join(file for task in _ALL for file in task.files)
    return (
        f"name the directory by the environment variable {DATA_VARIABLE} or by the task's "
        f"argument `data`; each task reads its own file of these in it: {layout}"
    )
