"""Lungs in chest X-rays: masks of 64 × 64 images from five real sites."""

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
from lightyear_node.lab.tasks.prepared import choose, enlarge_validation, parts, pixels, read
from lightyear_node.lab.tasks.recipes import segmentation_recipes

FILE = "cxr_lungs/cxr_lungs.npz"
FIELDS = ("images", "masks", "client", "split", "patient", "paper200")
CLIENTS = 5
"""The file has a sixth group, images of unknown origin, which is not used."""

VALIDATION_MIN = 8
"""In the file some sites have two validation images, on which any two networks agree perfectly."""

RECIPES = segmentation_recipes(batch_size=4)


@prepared_task("cxr_lungs", CLIENTS, RECIPES)
def build(client: ClientSelection, *, subset: str = "paper200") -> TrainingProblem:
    """`subset`: `paper200`, 40 images per site as in the paper, or `all`, 41 to 566 of them."""
    if subset not in ("paper200", "all"):
        raise ConfigError(f"there is no subset `{subset}`", hint="known: paper200, all")
    images, masks, owner, split, patient, in_paper = read(FILE, FIELDS, client.data)
    mine = owner == client.number
    if subset == "paper200":
        mine = mine & (in_paper == 1)
    split = enlarge_validation(split, mine, VALIDATION_MIN, patient, client.number)
    chosen = choose(split, mine, client.number, client.amounts)
    inputs = [pixels(images[rows]) for rows in chosen]
    return segmentation(parts(inputs, torch.from_numpy(masks.astype(np.int64)), chosen))
