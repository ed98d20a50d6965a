"""Heart disease, yes or no, from 13 clinical values at four real hospitals.  Not in the paper.

Trains in a second.  Many values are missing, and which ones depends on the hospital, so each value
has a second column that marks it as missing.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from lightyear_node.lab.tasks.losses import binary_accuracy
from lightyear_node.lab.tasks.networks import SmallMLP
from lightyear_node.lab.tasks.options import ClientSelection, TrainingProblem, prepared_task
from lightyear_node.lab.tasks.prepared import FIXED_SEED, TEST, TRAIN, VAL, choose, parts, read
from lightyear_node.lab.tasks.recipes import Recipe, adam

FILE = "heart_disease/heart_disease.npz"
CLIENTS = 4

SCALES = {  # typical value and deviation
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
"""From general knowledge, not from the data: no site learns the statistics of another."""

NEVER_ZERO = ("trestbps", "chol")
"""Columns in which 0 stands for a missing value."""

SHARES = {TRAIN: 0.6, VAL: 0.2, TEST: 0.2}

RECIPE = Recipe(network=lambda: SmallMLP(2 * len(SCALES)), optimizer=adam, lr=1e-3, batch_size=16)


@prepared_task("heart", CLIENTS, {"small": RECIPE}, network=None)
def build(client: ClientSelection) -> TrainingProblem:
    fields = ("features", "labels", "client", "feature_names")
    features, labels, owner, names = read(FILE, fields, client.data)
    chosen = choose(_splits(owner), owner == client.number, client.number, client.amounts)
    table = columns(features, [name.decode() for name in names])
    inputs = [table[torch.from_numpy(rows)] for rows in chosen]
    targets = torch.from_numpy(labels).float()[:, None]  # (n, 1), as the logits are
    return TrainingProblem(
        parts(inputs, targets, chosen),
        functional.binary_cross_entropy_with_logits,
        {"accuracy": binary_accuracy},
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
    """The file has none: 60 % of each hospital for training, 20 % validation, 20 % test."""
    split = np.full(len(owner), TRAIN, dtype=np.uint8)
    for client in range(CLIENTS):
        rows = np.random.default_rng((FIXED_SEED, client)).permutation(
            np.flatnonzero(owner == client)
        )
        val, test = round(SHARES[TRAIN] * len(rows)), round((1 - SHARES[TEST]) * len(rows))
        split[rows[val:test]] = VAL
        split[rows[test:]] = TEST
    return split
