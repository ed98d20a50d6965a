"""Vessels of the retina: masks of 64 × 64 tiles from three real sites.  Not in the paper."""

from __future__ import annotations

import numpy as np
import torch

from lightyear_node.tasks.assembly import assemble_segmentation, pick, segmentation_recipes
from lightyear_node.tasks.prepared import Amounts, check_site, choose, parts, pixels, read
from lightyear_node.worker.task import Task

FILE = "retina_vessels/retina_vessels.npz"
CLIENTS = 3

RECIPES = segmentation_recipes(batch_size=8)


def build(
    site_index: int = 0,
    site_count: int = CLIENTS,
    *,
    data: str | None = None,
    network: str = "small",
    fraction: float = 1.0,
    train_samples: int | None = None,
    val_samples: int | None = None,
    test_samples: int | None = None,
    lr: float | None = None,
    epochs: int = 1,
    batch_size: int | None = None,
) -> Task:
    recipe = pick(RECIPES, network)
    client = check_site("retina", CLIENTS, site_index, site_count)
    amounts = Amounts(fraction, train_samples, val_samples, test_samples)
    images, masks, owner, split = read(FILE, ("images", "masks", "client", "split"), data)
    chosen = choose(split, owner == client, client, amounts)
    return assemble_segmentation(
        recipe,
        parts(
            [pixels(images[rows]) for rows in chosen],
            torch.from_numpy(masks.astype(np.int64)),
            chosen,
        ),
        lr=lr,
        epochs=epochs,
        batch_size=batch_size,
    )
