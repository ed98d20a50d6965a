"""Handwritten digits, distributed unevenly over the sites: real data that needs no download.

1,797 images of 8 × 8 pixels ship with scikit-learn.  Every site gets its own images, its own
mixture of digits and its own image quality: contrast, brightness, blur or noise.  No site has
enough data to learn well alone, and no two sites have the same distribution.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightyear_node.worker.task import Task

CLASSES = 10
SIDE = 8
LABEL_SKEW = 10.0
"""Dirichlet concentration of the digits' shares among sites; smaller is more uneven."""


class SmallCNN(nn.Sequential):
    """Two convolutions and two dense layers: 87,178 parameters.

    Wide for such small images: in a wide network the weights move less during training, so that
    models of different sites stay comparable for longer.
    """

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 2 * 2, 256),
            nn.ReLU(),
            nn.Linear(256, CLASSES),
        )


def build(
    site_index: int = 0,
    site_count: int = 1,
    seed: int = 0,
    lr: float = 1e-3,
    epochs: int = 4,
    batch_size: int = 16,
) -> Task:
    """The data of site `site_index` of `site_count`; equal for all runs with the same seed."""
    images, labels = _digits()
    mine = _distribute(labels, site_count, seed)[site_index % site_count]
    images = _rendered(images[mine], site_index, seed)
    labels = labels[mine]
    # Shuffled already: 50 % training, 20 % validation, 30 % test.
    train, val = int(0.5 * len(mine)), int(0.7 * len(mine))
    parts = [
        TensorDataset(torch.from_numpy(images[part]), torch.from_numpy(labels[part]))
        for part in (slice(0, train), slice(train, val), slice(val, None))
    ]
    return Task(
        model=SmallCNN,
        loss=functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr),
        train_data=DataLoader(parts[0], batch_size, shuffle=True),
        val_data=DataLoader(parts[1], 256),
        test_data=DataLoader(parts[2], 256),
        metrics={"accuracy": accuracy},
        epochs=epochs,
    )


def accuracy(logits: Tensor, target: Tensor) -> float:
    return (logits.argmax(1) == target).float().mean().item()


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """All images and labels, from the file inside scikit-learn.

    Read without importing scikit-learn, which would cost every site a second and 80 MB.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the digits are part of scikit-learn", name="sklearn")
    file = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    table = np.loadtxt(file, delimiter=",", dtype=np.int64)  # (image, 64 pixels of 0 … 16 + label)
    images = (table[:, :-1] / 16.0).astype(np.float32).reshape(-1, 1, SIDE, SIDE)
    return images, table[:, -1]


def _distribute(labels: np.ndarray, sites: int, seed: int) -> list[np.ndarray]:
    """Assign every image to one site: uneven shares of each digit, similar numbers of images."""
    rng = np.random.default_rng((seed, 1))
    shares = rng.dirichlet(np.full(CLASSES, LABEL_SKEW), size=sites)  # (site, digit)
    shares /= shares.sum(axis=0, keepdims=True)
    rows_of: list[list[int]] = [[] for _ in range(sites)]
    for digit in range(CLASSES):
        rows = rng.permutation(np.flatnonzero(labels == digit))
        cuts = (np.cumsum(shares[:, digit])[:-1] * len(rows)).astype(int)
        for own, part in zip(rows_of, np.split(rows, cuts), strict=True):
            own.extend(part.tolist())
    return [rng.permutation(np.array(own, dtype=np.int64)) for own in rows_of]


def _rendered(images: np.ndarray, site: int, seed: int) -> np.ndarray:
    """The images with the quality of this site; pixels in 0 … 1."""
    rng = np.random.default_rng((seed, 2, site))
    match site % 5:
        case 0:
            rendered = images
        case 1:  # washed out
            rendered = 0.45 * images + 0.3
        case 2:  # out of focus
            padded = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
            rendered = (
                4 * images
                + padded[..., :-2, 1:-1]
                + padded[..., 2:, 1:-1]
                + padded[..., 1:-1, :-2]
                + padded[..., 1:-1, 2:]
            ) / 8
        case 3:  # grainy
            rendered = images + rng.normal(0, 0.15, images.shape)
        case _:  # overexposed
            rendered = np.clip(1.6 * images + 0.1, 0, 1)
    return rendered.astype(np.float32)
