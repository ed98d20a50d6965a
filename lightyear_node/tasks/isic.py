"""Skin lesions (Fed-ISIC2019): 8 diagnoses from the 6 real centres, at low resolution."""

from __future__ import annotations

import numpy as np
import torch

from lightyear_node.tasks.assembly import Recipe, adam, assemble, pick
from lightyear_node.tasks.losses import WeightedFocalLoss, accuracy
from lightyear_node.tasks.medical_networks import efficientnet_b0
from lightyear_node.tasks.networks import SmallBatchNormCNN
from lightyear_node.tasks.prepared import (
    TRAIN,
    Amounts,
    check_site,
    choose,
    enlarge_validation,
    parts,
    photographs,
    read,
)
from lightyear_node.worker.task import Task

FILE = "fed_isic2019/fed_isic2019_u8_64.npz"
FULL_FILE = "fed_isic2019/fed_isic2019_jpeg84.npz"
CLIENTS = 6
CLASS_COUNTS = (3325, 9077, 2644, 675, 1939, 184, 201, 485)
"""Of the full set's training images, all centres together: MEL NV BCC AK BKL DF VASC SCC."""

VALIDATION_SHARE = 0.2
"""Of the training images; the files have no validation part."""

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
    """N / n_c over all centres, as FLamby has it, so that every site minimises the same loss.

    The counts of a public set are public.  In a real federation each site would have to publish
    its own, or use weights of its own.
    """
    counts = torch.tensor(CLASS_COUNTS, dtype=torch.float32)
    return counts.sum() / counts


def build(
    site_index: int = 0,
    site_count: int = CLIENTS,
    *,
    data: str | None = None,
    network: str = "paper",
    full: bool = False,
    shrink: int = 1,
    fraction: float = 1.0,
    train_samples: int | None = None,
    val_samples: int | None = None,
    test_samples: int | None = None,
    lr: float | None = None,
    epochs: int = 1,
    batch_size: int | None = None,
) -> Task:
    """`full`: all 23,165 images of 84 × 84 instead of 200 per centre of 64 × 64."""
    recipe = pick(RECIPES, network)
    client = check_site("isic", CLIENTS, site_index, site_count)
    amounts = Amounts(fraction, train_samples, val_samples, test_samples)
    file = FULL_FILE if full else FILE
    labels, owner, split, image = read(file, ("labels", "client", "split", "isic_id"), data)
    mine = owner == client
    wanted = round(VALIDATION_SHARE * np.count_nonzero(mine & (split == TRAIN)))
    split = enlarge_validation(split, mine, wanted, image, client)
    chosen = choose(split, mine, client, amounts)
    images = photographs(file, chosen, jpeg=full, shrink=shrink, data=data)
    return assemble(
        recipe,
        parts(images, torch.from_numpy(labels).long(), chosen),
        loss=WeightedFocalLoss(class_weights()),
        metrics={"accuracy": accuracy},
        lr=lr,
        epochs=epochs,
        batch_size=batch_size,
    )
