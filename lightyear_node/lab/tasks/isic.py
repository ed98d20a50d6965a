"""Skin lesions (Fed-ISIC2019): 8 diagnoses from the 6 real centres, at low resolution."""

from __future__ import annotations

import numpy as np
import torch

from lightyear_node.errors import ConfigError
from lightyear_node.lab.tasks.augmentation import augmented
from lightyear_node.lab.tasks.losses import WeightedFocalLoss, accuracy
from lightyear_node.lab.tasks.medical_networks import efficientnet_b0
from lightyear_node.lab.tasks.networks import SmallBatchNormCNN
from lightyear_node.lab.tasks.options import ClientSelection, TrainingProblem, prepared_task
from lightyear_node.lab.tasks.prepared import (
    TRAIN,
    choose,
    enlarge_validation,
    parts,
    photographs,
    read,
)
from lightyear_node.lab.tasks.recipes import Recipe, adam

FILE = "fed_isic2019/fed_isic2019_u8_64.npz"
FULL_FILE = "fed_isic2019/fed_isic2019_jpeg84.npz"
CLIENTS = 6
CLASS_COUNTS = (3325, 9077, 2644, 675, 1939, 184, 201, 485)
"""Training images of the full set per class: MEL NV BCC AK BKL DF VASC SCC."""

VALIDATION_SHARE = 0.2
"""Share of the training images; the files have no validation split."""

RECIPES = {
    "paper": Recipe(network=efficientnet_b0, optimizer=adam, lr=5e-4, batch_size=32),
    "small": Recipe(
        network=lambda: SmallBatchNormCNN(len(CLASS_COUNTS)),
        optimizer=adam,
        lr=5e-4,
        batch_size=16,
    ),
}


def class_weights() -> torch.Tensor:
    """N / n_c over all centres, as in FLamby, so that every site minimises the same loss.

    In a real federation each site would have to publish its class counts, or use its own weights.
    """
    counts = torch.tensor(CLASS_COUNTS, dtype=torch.float32)
    return counts.sum() / counts


@prepared_task("isic", CLIENTS, RECIPES)
def build(
    client: ClientSelection,
    *,
    full: bool = False,
    shrink: int = 1,
    side: int | None = None,
    augment: bool = False,
) -> TrainingProblem:
    """`full`: all 23,165 images of 84 × 84 instead of 200 per centre of 64 × 64.

    `side=64` brings the full ones to 64 × 64.  `augment`: random crops, scales, rotations, shears
    and brightness of the training images, as in the paper.
    """
    if side is not None and (side < 1 or not full):
        raise ConfigError(f"`side` is {side}", hint="give at least 1, together with `full`")
    file = FULL_FILE if full else FILE
    fields = ("labels", "client", "split", "isic_id")
    labels, owner, split, image = read(file, fields, client.data)
    mine = owner == client.number
    wanted = round(VALIDATION_SHARE * np.count_nonzero(mine & (split == TRAIN)))
    split = enlarge_validation(split, mine, wanted, image, client.number)
    chosen = choose(split, mine, client.number, client.amounts)
    images = photographs(file, chosen, jpeg=full, shrink=shrink, data=client.data, side=side)
    targets = torch.from_numpy(labels).long()
    return TrainingProblem(
        parts(images, targets, chosen),
        WeightedFocalLoss(class_weights()),
        {"accuracy": accuracy},
        augment=augmented if augment else None,
    )
