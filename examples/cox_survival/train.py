"""Survival of patients from tabular data, with Cox's partial likelihood as the loss."""

import argparse

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightyear_node.training as ly

parser = argparse.ArgumentParser()
parser.add_argument("--site", type=int, default=0)
site = parser.parse_args().site

model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))  # the log of the hazard


def cohort(count: int, seed: int) -> TensorDataset:
    """Covariates, and (time, event) as the target; here synthetic."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 10, generator=draw)
    hazard = (x[:, 0] - x[:, 1] + 0.5 * x[:, 2]).exp()
    death = torch.empty(count).exponential_(generator=draw) / hazard
    censored = torch.empty(count).exponential_(0.3, generator=draw)
    return TensorDataset(x, torch.stack([death.minimum(censored), (death < censored).float()], 1))


def cox_loss(risk: Tensor, target: Tensor) -> Tensor:
    """Negative partial log-likelihood per event; a batch is a risk set of its own."""
    time, event = target.unbind(1)
    order = time.argsort(descending=True)
    risk, event = risk.squeeze(1)[order], event[order]
    return ((risk.logcumsumexp(0) - risk) * event).sum() / event.sum().clamp(min=1)


def concordance(risk: Tensor, target: Tensor) -> float:
    """The share of comparable pairs in which the higher risk has the earlier event."""
    time, event = target.unbind(1)
    pairs = (time[:, None] < time[None]) & (event[:, None] == 1)
    return float((risk > risk.T)[pairs].float().mean())


train_loader = DataLoader(cohort(400, 10 + site), 100, shuffle=True)
val_loader = DataLoader(cohort(200, 90 + site), 200)
ly.init(model, val_data=val_loader, loss=cox_loss, metrics={"concordance": concordance})
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
progress = {"epochs": 0}
ly.state(optimizer, progress=progress)

while ly.running():
    ly.receive(model)
    for x, target in train_loader:
        optimizer.zero_grad()
        cox_loss(model(x), target).backward()
        optimizer.step()
    progress["epochs"] += 1
    print(f"epoch {progress['epochs']}, end of the round")
    ly.send(model)
