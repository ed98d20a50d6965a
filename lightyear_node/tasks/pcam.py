"""Lymph-node patches (PatchCamelyon): tumour or none, in the place of the paper's Camelyon17.

The five clients are groups of similar stain: the hospitals are not in the data, only inferred.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from lightyear_node.tasks.assembly import Recipe, adam, assemble, pick, sgd
from lightyear_node.tasks.losses import accuracy
from lightyear_node.tasks.medical_networks import densenet121
from lightyear_node.tasks.networks import SmallBatchNormCNN
from lightyear_node.tasks.prepared import Amounts, check_site, choose, parts, photographs, read
from lightyear_node.worker.task import Task

FILE = "pcam_patches/pcam_u8_48.npz"
FULL_FILE = "pcam_patches/pcam_jpeg96.npz"
CLIENTS = 5
CLASSES = 2

RECIPES = {
    "paper": Recipe(network=densenet121, optimizer=sgd, lr=1e-3, batch_size=32),
    "small": Recipe(
        network=lambda: SmallBatchNormCNN(CLASSES), optimizer=adam, lr=1e-3, batch_size=16
    ),
}


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
    """`full`: all 3,051 patches of 96 × 96 instead of 1,300 balanced ones of 48 × 48.

    `shrink=2` brings the full ones to 48 × 48.
    """
    recipe = pick(RECIPES, network)
    client = check_site("pcam", CLIENTS, site_index, site_count)
    amounts = Amounts(fraction, train_samples, val_samples, test_samples)
    file = FULL_FILE if full else FILE
    labels, owner, split = read(file, ("labels", "client", "split"), data)
    chosen = choose(split, owner == client, client, amounts)
    images = photographs(file, chosen, jpeg=full, shrink=shrink, data=data)
    return assemble(
        recipe,
        parts(images, torch.from_numpy(labels).long(), chosen),
        loss=functional.cross_entropy,
        metrics={"accuracy": accuracy},
        lr=lr,
        epochs=epochs,
        batch_size=batch_size,
    )
