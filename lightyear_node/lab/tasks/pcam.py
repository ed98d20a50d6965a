"""Lymph-node patches (PatchCamelyon): tumour or none, instead of the paper's Camelyon17.

The five clients are groups of similar stain: the data set does not name the hospitals.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from lightyear_node.lab.tasks.losses import accuracy
from lightyear_node.lab.tasks.medical_networks import densenet121
from lightyear_node.lab.tasks.networks import SmallBatchNormCNN
from lightyear_node.lab.tasks.options import ClientSelection, TrainingProblem, prepared_task
from lightyear_node.lab.tasks.prepared import choose, parts, photographs, read
from lightyear_node.lab.tasks.recipes import Recipe, adam, sgd

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


@prepared_task("pcam", CLIENTS, RECIPES)
def build(client: ClientSelection, *, full: bool = False, shrink: int = 1) -> TrainingProblem:
    """`full`: all 3,051 patches of 96 × 96 instead of 1,300 balanced ones of 48 × 48.

    `shrink=2` brings the full ones to 48 × 48.
    """
    file = FULL_FILE if full else FILE
    labels, owner, split = read(file, ("labels", "client", "split"), client.data)
    chosen = choose(split, owner == client.number, client.number, client.amounts)
    images = photographs(file, chosen, jpeg=full, shrink=shrink, data=client.data)
    targets = torch.from_numpy(labels).long()
    return TrainingProblem(
        parts(images, targets, chosen), functional.cross_entropy, {"accuracy": accuracy}
    )
