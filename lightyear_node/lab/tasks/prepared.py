"""Prepared data sets: one npz file each, with a client and a split for every row.

Turns rows into a site's training, validation and test batches.  The selection depends on the file
and the arguments only, never on a run's seed: all runs of an experiment use the same samples.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightyear_node.errors import ConfigError
from lightyear_node.lab.tasks import data_file

SPLITS = (TRAIN, VAL, TEST) = (0, 1, 2)
"""The numbers in the files."""

FIXED_SEED = 17
"""Seed of every random selection; the splits in the files were drawn with it, too."""

Rows = NDArray[np.int64]
Samples = tuple[Tensor, Tensor]
Augment = Callable[[Tensor], Tensor]
"""Changes the inputs of a batch at random, with torch's global generator."""


@dataclass(frozen=True, slots=True)
class DataAmounts:
    """How much of a site's data is used: a fraction of each split, with a maximum for each."""

    fraction: float = 1.0
    train_samples: int | None = None
    val_samples: int | None = None
    test_samples: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                f"`fraction` is {self.fraction}", hint="give a number above 0 and at most 1"
            )
        for name in ("train_samples", "val_samples", "test_samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"`{name}` is {value}", hint="give at least 1, or leave it out to use all"
                )

    def of(self, split: int, available: int) -> int:
        most = (self.train_samples, self.val_samples, self.test_samples)[split]
        wanted = math.ceil(self.fraction * available)
        return wanted if most is None else min(wanted, most)


@dataclass(frozen=True, slots=True)
class SiteData:
    """One site's samples."""

    train: Samples
    val: Samples
    test: Samples


class Batches:
    """Samples in memory, a batch at a time; every sample in every pass.

    Shuffled with torch's global generator, which the worker seeds for each round.  Pixels are
    stored as bytes, a quarter of the memory.  `augment` changes the inputs of every batch.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        batch_size: int,
        *,
        shuffle: bool = False,
        augment: Augment | None = None,
    ) -> None:
        if len(x) != len(y):
            raise ValueError(f"{len(x)} inputs, but {len(y)} targets")
        if batch_size < 1:
            raise ConfigError(f"`batch_size` is {batch_size}", hint="give at least 1")
        self.dataset = x
        """The inputs; its length is the number of samples, as for torch's loaders."""
        self.targets = y
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.augment = augment

    def __len__(self) -> int:
        return len(self._sizes())

    def __iter__(self) -> Iterator[Samples]:
        for inputs, targets in self._stored():
            floats = _floats(inputs)
            yield floats if self.augment is None else self.augment(floats), targets

    def _stored(self) -> Iterator[Samples]:
        sizes = self._sizes()
        if self.shuffle:
            for rows in torch.split(torch.randperm(len(self.dataset)), sizes):
                yield self.dataset[rows], self.targets[rows]
        else:
            x, y = torch.split(self.dataset, sizes), torch.split(self.targets, sizes)
            yield from zip(x, y, strict=True)

    def _sizes(self) -> list[int]:
        whole, rest = divmod(len(self.dataset), self.batch_size)
        sizes = [self.batch_size] * whole
        if rest == 1 and whole:
            sizes[-1] += 1  # batch normalisation needs more than one sample
        elif rest:
            sizes.append(rest)
        return sizes


def read(relative: str, fields: Sequence[str], data: str | None = None) -> list[NDArray[Any]]:
    """Return arrays of a prepared file.  They are cached for all sites: do not write to them."""
    file = data_file(relative, data)
    return _arrays(file, file.stat().st_mtime_ns, tuple(fields))


@lru_cache(maxsize=2)  # all sites of a simulation read the same file, one after the other
def _arrays(file: Path, changed_ns: int, fields: tuple[str, ...]) -> list[NDArray[Any]]:
    try:
        with np.load(file, allow_pickle=False) as stored:
            return [stored[field] for field in fields]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as problem:
        raise ConfigError(
            f"`{file.name}` cannot be read as this task's data",
            hint="prepare the file again",
            private=str(problem),
        ) from problem


def check_site(name: str, clients: int, site_index: int, site_count: int) -> int:
    """Return the number of the client whose data a site gets, which is the site's own.

    With more sites than clients every site refuses to start: otherwise those with data would wait
    for those without.
    """
    if site_count > clients or not 0 <= site_index < clients:
        raise ConfigError(
            f"{name} has data for {clients} sites; this is site number {site_index} "
            f"(counted from 0) of {site_count}",
            hint=f"use at most {clients} sites",
        )
    return site_index


def choose(
    split: NDArray[Any], mine: NDArray[np.bool_], client: int, amounts: DataAmounts
) -> list[Rows]:
    """Row numbers of one client's training, validation and test samples.

    Each split has a fixed order of which the first samples are used, so that a smaller selection
    is part of every larger one.
    """
    chosen = []
    for part in SPLITS:
        rows = np.flatnonzero(mine & (split == part))
        order = np.random.default_rng((FIXED_SEED, client, part)).permutation(rows)
        chosen.append(order[: amounts.of(part, len(rows))])
    return chosen


def enlarge_validation(
    split: NDArray[Any], mine: NDArray[np.bool_], wanted: int, groups: NDArray[Any], client: int
) -> NDArray[Any]:
    """Return the splits with some groups of a client moved from training to validation.

    For files whose validation split is missing or too small to judge peers.  Rows of one group,
    such as the images of a patient, stay together.
    """
    moved = split.copy()
    missing = wanted - int((mine & (split == VAL)).sum())
    training = mine & (split == TRAIN)
    for group in np.random.default_rng((FIXED_SEED, client)).permutation(
        np.unique(groups[training])
    ):
        if missing <= 0:
            break
        rows = training & (groups == group)
        moved[rows] = VAL
        missing -= int(rows.sum())
    return moved


def parts(inputs: Sequence[Tensor], targets: Tensor, chosen: Sequence[Rows]) -> SiteData:
    """Pair the inputs, given by split, with the targets, given for all rows of the file."""
    pairs = [(x, targets[torch.from_numpy(rows)]) for x, rows in zip(inputs, chosen, strict=True)]
    return SiteData(*pairs)


def pixels(images: NDArray[np.uint8]) -> Tensor:
    """Images (n, h, w) or (n, h, w, 3) in torch's order, (n, channels, h, w), as bytes."""
    channels_first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(channels_first))


def photographs(
    relative: str,
    chosen: Sequence[Rows],
    *,
    jpeg: bool,
    shrink: int,
    data: str | None,
    side: int | None = None,
) -> list[Tensor]:
    """Return the chosen rows' images, from an array of pixels or a blob of JPEG files.

    JPEGs are reduced by the factor `shrink` on each side, then scaled to `side` × `side`.
    """
    if not jpeg:
        (images,) = read(relative, ("images",), data)
        return [pixels(images[rows]) for rows in chosen]
    blob, offset = read(relative, ("jpeg", "offset"), data)
    return [pixels(_decoded(blob, offset, rows, shrink, side)) for rows in chosen]


def _decoded(
    blob: NDArray[np.uint8],
    offset: NDArray[np.int64],
    rows: Rows,
    shrink: int,
    side: int | None,
) -> NDArray[np.uint8]:
    try:
        from PIL import Image
    except ModuleNotFoundError as problem:
        raise ConfigError(
            "the full-size images are JPEG files, which need Pillow",
            hint="pip install pillow, or leave out `full`",
        ) from problem
    files = (BytesIO(blob[offset[row] : offset[row + 1]].tobytes()) for row in rows)
    images = (Image.open(file).convert("RGB").reduce(shrink) for file in files)
    if side is not None:
        images = (image.resize((side, side), Image.Resampling.BOX) for image in images)
    return np.stack([np.asarray(image) for image in images])


def _floats(x: Tensor) -> Tensor:
    """Scale bytes to 0 … 1; leave other types unchanged."""
    return x.float().div_(255) if x.dtype == torch.uint8 else x
