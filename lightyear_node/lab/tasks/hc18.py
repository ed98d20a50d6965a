"""Fetal heads in ultrasound images (HC18): masks of 64 × 64 images, from one hospital.

The five clients are groups of subjects: drawn at random, or by the size of the head, which follows
the gestational age.  In the latter case 29 subjects are in two clients, but never in two splits.
"""

from __future__ import annotations

import numpy as np
import torch

from lightyear_node.errors import ConfigError
from lightyear_node.lab.tasks.options import (
    ClientSelection,
    TrainingProblem,
    prepared_task,
    segmentation,
)
from lightyear_node.lab.tasks.prepared import choose, parts, pixels, read
from lightyear_node.lab.tasks.recipes import segmentation_recipes

FILE = "hc18_fetal/hc18_fetal.npz"
CLIENTS = 5
OWNERS = {"subject": "client", "size": "client_hc"}

RECIPES = segmentation_recipes(batch_size=8)


@prepared_task("hc18", CLIENTS, RECIPES)
def build(client: ClientSelection, *, split_by: str = "subject") -> TrainingProblem:
    """`split_by`: `subject` for similar sites, `size` for different ones."""
    if split_by not in OWNERS:
        raise ConfigError(
            f"subjects cannot be split by `{split_by}`", hint="known: " + ", ".join(OWNERS)
        )
    fields = ("images", "masks", OWNERS[split_by], "split")
    images, masks, owner, split = read(FILE, fields, client.data)
    chosen = choose(split, owner == client.number, client.number, client.amounts)
    inputs = [pixels(images[rows]) for rows in chosen]
    return segmentation(parts(inputs, torch.from_numpy(masks.astype(np.int64)), chosen))
