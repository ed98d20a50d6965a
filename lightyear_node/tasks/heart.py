"""Heart disease, yes or no, from 13 clinical values at four real hospitals.  Not in the paper.

Tables are what hospitals have most of; it trains in a second.  Many values are missing, and which
ones depends on the hospital, so each value comes with a mark that says whether it is there.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from lightyear_node.tasks.assembly import Recipe, adam, assemble
from lightyear_node.tasks.losses import binary_accuracy
from lightyear_node.tasks.networks import SmallMLP
from lightyear_node.tasks.prepared import (
    FIXED_SEED,
    TEST,
    TRAIN,
    VAL,
    Amounts,
    check_site,
    choose,
    parts,
    read,
)
from lightyear_node.worker.task import Task

FILE = "heart_disease/heart_disease.npz"
CLIENTS = 4

SCALES = {  # a middling value and a usual deviation
    "age": (55, 10),  # years
    "sex": (0.5, 0.5),
    "cp": (2.5, 1),  # type of chest pain, 1 … 4
    "trestbps": (130, 20),  # mmHg at rest
    "chol": (230, 50),  # mg/dl
    "fbs": (0.5, 0.5),  # fasting blood sugar above 120 mg/dl
    "restecg": (1, 1),  # 0 … 2
    "thalach": (140, 25),  # highest heart rate
    "exang": (0.5, 0.5),  # angina by exercise
    "oldpeak": (1, 1),  # ST depression, mm
    "slope": (2, 1),  # 1 … 3
    "ca": (1.5, 1.5),  # vessels coloured, 0 … 3
    "thal": (5, 2),  # 3, 6 or 7
}
"""From what such values usually are, not from anybody's data: no site learns of another's."""

NEVER_ZERO = ("trestbps", "chol")
"""Nobody lives without blood pressure or cholesterol: 0 stands for a missing value."""

SHARES = {TRAIN: 0.6, VAL: 0.2, TEST: 0.2}

RECIPE = Recipe(network=lambda: SmallMLP(2 * len(SCALES)), optimizer=adam, lr=1e-3, batch_size=16)


def build(
    site_index: int = 0,
    site_count: int = CLIENTS,
    *,
    data: str | None = None,
    fraction: float = 1.0,
    train_samples: int | None = None,
    val_samples: int | None = None,
    test_samples: int | None = None,
    lr: float | None = None,
    epochs: int = 1,
    batch_size: int | None = None,
) -> Task:
    client = check_site("heart", CLIENTS, site_index, site_count)
    amounts = Amounts(fraction, train_samples, val_samples, test_samples)
    features, labels, owner, names = read(
        FILE, ("features", "labels", "client", "feature_names"), data
    )
    chosen = choose(_splits(owner), owner == client, client, amounts)
    table = columns(features, [name.decode() for name in names])
    return assemble(
        RECIPE,
        parts(
            [table[torch.from_numpy(rows)] for rows in chosen],
            torch.from_numpy(labels).float()[:, None],  # (n, 1), as the logits are
            chosen,
        ),
        loss=functional.binary_cross_entropy_with_logits,
        metrics={"accuracy": binary_accuracy},
        lr=lr,
        epochs=epochs,
        batch_size=batch_size,
    )


def columns(features: NDArray[np.float32], names: list[str]) -> Tensor:
    """(n, 13) with NaN to (n, 26): scaled, 0 where missing, then 1 for each missing value."""
    values = features.copy()
    for name in NEVER_ZERO:
        column = values[:, names.index(name)]
        column[column == 0] = np.nan
    scales = np.array([SCALES[name] for name in names], dtype=np.float32)  # (13, 2)
    missing = np.isnan(values)
    scaled = np.where(missing, 0, (values - scales[:, 0]) / scales[:, 1])
    return torch.from_numpy(np.hstack([scaled, missing]).astype(np.float32))


def _splits(owner: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The file has none: 60 % of each hospital to train, 20 % to judge by, 20 % to report on."""
    split = np.full(len(owner), TRAIN, dtype=np.uint8)
    for client in range(CLIENTS):
        rows = np.random.default_rng((FIXED_SEED, client)).permutation(
            np.flatnonzero(owner == client)
        )
        val, test = round(SHARES[TRAIN] * len(rows)), round((1 - SHARES[TEST]) * len(rows))
        split[rows[val:test]] = VAL
        split[rows[test:]] = TEST
    return split
