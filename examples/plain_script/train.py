"""A training script of one's own in a federation: python train.py --site 0, or by a node."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightyear_node.training as ly

parser = argparse.ArgumentParser()
parser.add_argument("--site", type=int, default=0)
parser.add_argument("--lr", type=float, default=0.05)
options = parser.parse_args()

# First of all: every site builds the same weights, because the node has set torch's seed.
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))


def samples(count: int, seed: int) -> TensorDataset:
    """The site's own data; here synthetic."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


train_set, val_set = samples(240, 10 + options.site), samples(120, 90 + options.site)
train_loader = DataLoader(train_set, 24, shuffle=True)


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float((logits.argmax(1) == labels).float().mean())


ly.init(
    model,
    val_data=DataLoader(val_set, 60),
    loss=F.cross_entropy,
    metrics={"accuracy": accuracy},
)
optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
progress = {"epochs": 0}
ly.state(optimizer, scheduler=scheduler, progress=progress)

while ly.running():
    ly.receive(model)
    model.train()
    for x, y in train_loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    scheduler.step()
    progress["epochs"] += 1
    print(f"epoch {progress['epochs']}, learning rate {scheduler.get_last_lr()[0]:.4f}")
    ly.send(model, samples=len(train_set))
