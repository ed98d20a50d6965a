"""Vessels of the retina: masks of 64 × 64 tiles from three real sites.  Not in the paper."""

from __future__ import annotations

import numpy as np
import torch

from lightyear_node.lab.tasks.options import (
    ClientSelection,
    TrainingProblem,
    prepared_task,
    segmentation,
)
from lightyear_node.lab.tasks.prepared import choose, parts, pixels, read
from lightyear_node.lab.tasks.recipes import segmentation_recipes

FILE = "retina_vessels/retina_vessels.npz"
CLIENTS = 3

RECIPES = segmentation_recipes(batch_size=8)


@prepared_task("retina", CLIENTS, RECIPES, network="small")
def build(client: ClientSelection) -> TrainingProblem:
    fields = ("images", "masks", "client", "split")
    images, masks, owner, split = read(FILE, fields, client.data)
    chosen = choose(split, owner == client.number, client.number, client.amounts)
    inputs = [pixels(images[rows]) for rows in chosen]
    return segmentation(parts(inputs, torch.from_numpy(masks.astype(np.int64)), chosen))
