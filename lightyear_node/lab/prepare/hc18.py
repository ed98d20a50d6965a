"""HC18: ultrasound images and the outlines of the heads, of the challenge's training set."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightyear_node.lab.prepare.arrays import Prepared, found, names, read_image, split_by_group
from lightyear_node.lab.tasks.hc18 import CLIENTS, FILE
from lightyear_node.lab.tasks.prepared import FIXED_SEED

SIZE = (64, 64)
TABLE = "training_set_pixel_size_and_HC.csv"


def prepare(source: Path) -> Prepared:
    """`source` holds the folder `training_set` and the table of circumferences."""
    [table] = found(source, TABLE)
    with table.open(newline="", encoding="utf-8") as file:
        rows = sorted(list(csv.reader(file))[1:])  # file name, pixel size, circumference
    folder = source / "training_set"
    images, masks, numbers = [], [], []
    for name, *_ in rows:
        images.append(read_image(folder / name, "L", SIZE))
        outline = read_image(folder / name.replace(".png", "_Annotation.png"), "L")
        masks.append(_halved(_filled(outline > 0)))
        numbers.append(int(re.match(r"\d+", name)[0]))  # type: ignore[index]
    circumference = np.array([row[2] for row in rows], dtype=np.float32)
    subjects, subject = np.unique(numbers, return_inverse=True)
    order = np.random.default_rng(FIXED_SEED).permutation(len(subjects))
    client = (order[subject] % CLIENTS).astype(np.uint8)
    fifths = np.quantile(circumference, np.arange(1, CLIENTS) / CLIENTS)
    return {
        FILE: {
            "images": np.stack(images),
            "masks": np.stack(masks),
            "client": client,
            "client_hc": np.searchsorted(fifths, circumference, side="right").astype(np.uint8),
            "subject": subject.astype(np.int16),
            "split": split_by_group(client, subject),
            "hc_mm": circumference,
            "pixel_mm": np.array([row[1] for row in rows], dtype=np.float32),
            "file_name": names([row[0] for row in rows]),
        }
    }


def _filled(outline: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Fill a convex outline, row by row, from its first to its last pixel."""
    after = np.logical_or.accumulate(outline, axis=1)
    before = np.logical_or.accumulate(outline[:, ::-1], axis=1)[:, ::-1]
    return np.where(after & before, np.uint8(255), np.uint8(0))


def _halved(mask: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Resize a mask; a pixel belongs to it if at least half of its area does."""
    from lightyear_node.lab.prepare.arrays import resized

    return (resized(mask, SIZE) >= 128).astype(np.uint8)
