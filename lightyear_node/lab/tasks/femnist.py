"""Handwritten characters (FEMNIST): 62 classes, 28 × 28 gray, 8 clients with different writers.

Ink is 1 and paper 0.  LEAF's files are inverted, and the small network learns more slowly from
those (one site, 600 images, 12 epochs: .37 instead of .53).
"""

from __future__ import annotations

import torch
from torch.nn import functional

from lightyear_node.lab.tasks.losses import accuracy
from lightyear_node.lab.tasks.networks import PaperCNN, SmallCNN28
from lightyear_node.lab.tasks.options import ClientSelection, TrainingProblem, prepared_task
from lightyear_node.lab.tasks.prepared import choose, parts, pixels, read
from lightyear_node.lab.tasks.recipes import Recipe, decaying_adam

FILE = "femnist/femnist.npz"
CLIENTS = 8

RECIPES = {
    "paper": Recipe(network=PaperCNN, optimizer=decaying_adam, lr=1e-3, batch_size=32),
    "small": Recipe(network=SmallCNN28, optimizer=decaying_adam, lr=1e-3, batch_size=32),
}


@prepared_task("femnist", CLIENTS, RECIPES)
def build(client: ClientSelection) -> TrainingProblem:
    fields = ("images", "labels", "client", "split")
    images, labels, owner, split = read(FILE, fields, client.data)
    chosen = choose(split, owner == client.number, client.number, client.amounts)
    mine = [pixels(255 - images[rows]) for rows in chosen]
    targets = torch.from_numpy(labels).long()
    return TrainingProblem(
        parts(mine, targets, chosen), functional.cross_entropy, {"accuracy": accuracy}
    )
