"""Lungs in chest X-rays: masks of 64 × 64 images from five real sites."""

from __future__ import annotations

import numpy as np
import torch

from lightyear_node.errors import ConfigError
from lightyear_node.tasks.assembly import assemble_segmentation, pick, segmentation_recipes
from lightyear_node.tasks.prepared import (
    Amounts,
    check_site,
    choose,
    enlarge_validation,
    parts,
    pixels,
    read,
)
from lightyear_node.worker.task import Task

FILE = "cxr_lungs/cxr_lungs.npz"
FIELDS = ("images", "masks", "client", "split", "patient", "paper200")
CLIENTS = 5
"""The file has a sixth, of images from unknown places; it is no site."""

VALIDATION_MIN = 8
"""On two images, which is all that the file gives some sites, any two networks agree perfectly."""

RECIPES = segmentation_recipes(batch_size=4)


def build(
    site_index: int = 0,
    site_count: int = CLIENTS,
    *,
    data: str | None = None,
    network: str = "paper",
    subset: str = "paper200",
    fraction: float = 1.0,
    train_samples: int | None = None,
    val_samples: int | None = None,
    test_samples: int | None = None,
    lr: float | None = None,
    epochs: int = 1,
    batch_size: int | None = None,
) -> Task:
    """`subset`: `paper200`, 40 images per site as in the paper, or `all`, 41 to 566 of them."""
    if subset not in ("paper200", "all"):
        raise ConfigError(f"there is no subset `{subset}`", hint="known: paper200, all")
    recipe = pick(RECIPES, network)
    client = check_site("cxr_lungs", CLIENTS, site_index, site_count)
    amounts = Amounts(fraction, train_samples, val_samples, test_samples)
    images, masks, owner, split, patient, in_paper = read(FILE, FIELDS, data)
    mine = owner == client
    if subset == "paper200":
        mine = mine & (in_paper == 1)
    split = enlarge_validation(split, mine, VALIDATION_MIN, patient, client)
    chosen = choose(split, mine, client, amounts)
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
