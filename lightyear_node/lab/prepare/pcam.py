"""PatchCamelyon: patches of the Histopathologic Cancer Detection challenge, grouped by stain."""

from __future__ import annotations

import csv
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
    split_by_group,
)
from lightyear_node.lab.tasks.pcam import CLASSES, CLIENTS, FILE, FULL_FILE
from lightyear_node.lab.tasks.prepared import FIXED_SEED, SPLITS, TEST, TRAIN, VAL

PATCHES = 3051
SIZE = (48, 48)
PER_CLIENT = {TRAIN: 180, VAL: 30, TEST: 50}
QUALITY = 85
VALLEY = 0.53
"""Between the two modes of the stain ratio; most likely they are the two hospitals."""
GROUPS = (3, 2)
"""Clients of the two stain domains."""
BLANK_DEVIATION = 6.0


def prepare(source: Path) -> Prepared:
    """`source` holds the folder `train` and `train_labels.csv`; some patches are drawn."""
    [table] = found(source, "train_labels.csv")
    with table.open(newline="", encoding="utf-8") as file:
        label_of = {row["id"]: int(row["label"]) for row in csv.DictReader(file)}
    paths = found(source / "train", "*.tif")
    order = np.random.default_rng(FIXED_SEED).permutation(len(paths))
    chosen: dict[str, NDArray[np.uint8]] = {}
    for path in (paths[number] for number in order):
        if len(chosen) == PATCHES:
            break
        patch = read_image(path, "RGB")
        if path.stem in label_of and patch.std() >= BLANK_DEVIATION:
            chosen[path.stem] = patch
    ids = sorted(chosen)
    images = [chosen[name] for name in ids]
    ratio = np.array([_stain_ratio(image) for image in images])
    client = _by_stain(ratio)
    rng = np.random.default_rng((FIXED_SEED, 1))
    columns: Arrays = {
        "labels": np.array([label_of[name] for name in ids], dtype=np.uint8),
        "client": client,
        "client_random": rng.permutation(np.arange(len(ids)) % CLIENTS).astype(np.uint8),
        "stain_domain": (ratio >= VALLEY).astype(np.uint8),
        "split": split_by_group(client, np.arange(len(ids))),
        "patch_id": names(ids),
    }
    few = _balanced(columns)
    smaller = {name: column[few] for name, column in columns.items()}
    smaller["images"] = np.stack([resized(images[row], SIZE) for row in few])
    return {FULL_FILE: {**jpeg_array(images, QUALITY), **columns}, FILE: smaller}


def _stain_ratio(image: NDArray[np.uint8]) -> float:
    """Mean optical density of blue over that of green."""
    density = -np.log((image.reshape(-1, 3).astype(np.float64) + 1) / 256).mean(axis=0)
    return float(density[2] / max(density[1], 1e-6))


def _by_stain(ratio: NDArray[np.float64]) -> NDArray[np.uint8]:
    client = np.zeros(len(ratio), dtype=np.uint8)
    first = 0
    for domain, groups in ((ratio < VALLEY, GROUPS[0]), (ratio >= VALLEY, GROUPS[1])):
        rows = np.flatnonzero(domain)
        for number, part in enumerate(np.array_split(rows[np.argsort(ratio[rows])], groups)):
            client[part] = first + number
        first += groups
    return client


def _balanced(columns: Arrays) -> NDArray[np.int64]:
    """Of each client and split the same number of patches with and without tumour, if possible."""
    chosen: list[NDArray[np.int64]] = []
    for client in range(CLIENTS):
        for part in SPLITS:
            for label in range(CLASSES):
                mine = (columns["client"] == client) & (columns["split"] == part)
                rows = np.flatnonzero(mine & (columns["labels"] == label))
                order = np.random.default_rng((FIXED_SEED, client, part, label)).permutation(rows)
                chosen.append(order[: PER_CLIENT[part] // CLASSES])
    return np.sort(np.concatenate(chosen))
