"""Fed-ISIC2019: images of ISIC 2019 with centre, diagnosis and split of FLamby."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightyear_node.lab.prepare.arrays import (
    Arrays,
    Prepared,
    found,
    jpeg_array,
    names,
    read_image,
    resized,
)
from lightyear_node.lab.tasks.isic import CLIENTS, FILE, FULL_FILE
from lightyear_node.lab.tasks.prepared import FIXED_SEED, TEST, TRAIN

FULL_SIZE, SIZE = (84, 84), (64, 64)
PER_CENTRE = {TRAIN: 160, TEST: 40}
CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
CENTRES = (
    "BCN (Barcelona)",
    "HAM vidir_molemax (Vienna)",
    "HAM vidir_modern (Vienna)",
    "HAM rosendahl (Queensland)",
    "MSK (New York)",
    "HAM vienna_dias",
)
MELANOMA, NEVUS = 0, 1
QUALITY = 90


def prepare(source: Path) -> Prepared:
    """`source` holds FLamby's `train_test_split` and the folder `ISIC_2019_Training_Input`."""
    [table] = found(source, "train_test_split")
    with table.open(newline="", encoding="utf-8") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["image"])
    folder = source / "ISIC_2019_Training_Input"
    rows = [row for row in rows if (folder / f"{row['image']}.jpg").is_file()]
    images = [read_image(folder / f"{row['image']}.jpg", "RGB", FULL_SIZE) for row in rows]
    columns: Arrays = {
        "labels": np.array([int(float(row["target"])) for row in rows], dtype=np.uint8),
        "client": np.array([int(float(row["center"])) for row in rows], dtype=np.uint8),
        "split": np.array(
            [TRAIN if row["fold"] == "train" else TEST for row in rows], dtype=np.uint8
        ),
        "isic_id": np.array(
            [int(re.search(r"\d+", row["image"])[0]) for row in rows],  # type: ignore[index]
            dtype=np.int32,
        ),
    }
    few = subset(columns)
    smaller = {name: column[few] for name, column in columns.items()}
    smaller["images"] = np.stack([resized(images[row], SIZE) for row in few])
    smaller["melanoma"] = (smaller["labels"] == MELANOMA).astype(np.uint8)
    classes = {"class_names": names(CLASSES), "client_names": names(CENTRES)}
    return {
        FULL_FILE: {**jpeg_array(images, QUALITY), **columns, **classes},
        FILE: {**smaller, **classes},
    }


def subset(columns: Arrays) -> NDArray[np.int64]:
    """Of each centre 160 training and 40 test images, at most half of them nevi if possible."""
    chosen: list[NDArray[np.int64]] = []
    for centre in range(CLIENTS):
        for part, count in PER_CENTRE.items():
            mine = np.flatnonzero((columns["client"] == centre) & (columns["split"] == part))
            order = np.random.default_rng((FIXED_SEED, centre, part)).permutation(mine)
            nevus = columns["labels"][order] == NEVUS
            others = order[~nevus]
            nevi = order[nevus][: max(count // 2, count - len(others))]
            chosen.append(np.concatenate([others[: count - len(nevi)], nevi]))
    return np.sort(np.concatenate(chosen))
