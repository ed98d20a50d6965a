"""Handwritten characters (FEMNIST): 62 classes, 28 × 28 gray, whole writers dealt to 8 clients.

Ink is 1 and paper 0.  LEAF, whose files these are, has it the other way round, with which the small
network learns more slowly (one site, 600 images, 12 epochs: .37 instead of .53).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from lightyear_node.tasks.assembly import Recipe, assemble, decaying_adam, pick
from lightyear_node.tasks.losses import accuracy
from lightyear_node.tasks.networks import PaperCNN, SmallCNN28
from lightyear_node.tasks.prepared import Amounts, check_site, choose, parts, pixels, read
from lightyear_node.worker.task import Task

FILE = "femnist/femnist.npz"
CLIENTS = 8

RECIPES = {
    "paper": Recipe(network=PaperCNN, optimizer=decaying_adam, lr=1e-3, batch_size=32),
    "small": Recipe(network=SmallCNN28, optimizer=decaying_adam, lr=1e-3, batch_size=32),
}


def build(
    site_index: int = 0,
    site_count: int = CLIENTS,
    *,
    data: str | None = None,
    network: str = "paper",
    fraction: float = 1.0,
    train_samples: int | None = None,
    val_samples: int | None = None,
    test_samples: int | None = None,
    lr: float | None = None,
    epochs: int = 1,
    batch_size: int | None = None,
) -> Task:
    recipe = pick(RECIPES, network)
    client = check_site("femnist", CLIENTS, site_index, site_count)
    amounts = Amounts(fraction, train_samples, val_samples, test_samples)
    images, labels, owner, split = read(FILE, ("images", "labels", "client", "split"), data)
    chosen = choose(split, owner == client, client, amounts)
    mine = [pixels(255 - images[rows]) for rows in chosen]
    return assemble(
        recipe,
        parts(mine, torch.from_numpy(labels).long(), chosen),
        loss=functional.cross_entropy,
        metrics={"accuracy": accuracy},
        lr=lr,
        epochs=epochs,
        batch_size=batch_size,
    )
