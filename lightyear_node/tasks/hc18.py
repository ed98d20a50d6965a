"""Fetal heads in ultrasound images (HC18): masks of 64 × 64 images, from one hospital.

The five clients are groups of subjects: drawn at random, or by the size of the head, which follows
the age of gestation.  In the latter case 29 subjects were seen at two clients, never in two splits.
"""

from __future__ import annotations

import numpy as np
import torch

from lightyear_node.errors import ConfigError
from lightyear_node.tasks.assembly import assemble_segmentation, pick, segmentation_recipes
from lightyear_node.tasks.prepared import Amounts, check_site, choose, parts, pixels, read
from lightyear_node.worker.task import Task

FILE = "hc18_fetal/hc18_fetal.npz"
CLIENTS = 5
OWNERS = {"subject": "client", "size": "client_hc"}

RECIPES = segmentation_recipes(batch_size=8)


def build(
    site_index: int = 0,
    site_count: int = CLIENTS,
    *,
    data: str | None = None,
    network: str = "paper",
    split_by: str = "subject",
    fraction: float = 1.0,
    train_samples: int | None = None,
    val_samples: int | None = None,
    test_samples: int | None = None,
    lr: float | None = None,
    epochs: int = 1,
    batch_size: int | None = None,
) -> Task:
    """`split_by`: `subject`, sites that are alike, or `size`, sites that differ."""
    if split_by not in OWNERS:
        raise ConfigError(
            f"subjects cannot be dealt out by `{split_by}`", hint="known: " + ", ".join(OWNERS)
        )
    recipe = pick(RECIPES, network)
    client = check_site("hc18", CLIENTS, site_index, site_count)
    amounts = Amounts(fraction, train_samples, val_samples, test_samples)
    fields = ("images", "masks", OWNERS[split_by], "split")
    images, masks, owner, split = read(FILE, fields, data)
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
