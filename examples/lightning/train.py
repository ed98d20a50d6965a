"""A Lightning trainer in a federation: bfloat16, accumulated gradients and a scheduler."""

import argparse

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightyear_node.training as ly


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)]

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.trainer.current_epoch + 1}, step {self.trainer.global_step}")


def samples(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


parser = argparse.ArgumentParser()
parser.add_argument("--site", type=int, default=0)
site = parser.parse_args().site

module = Classifier()  # before anything else draws random numbers
train_loader = DataLoader(samples(240, 10 + site), 12, shuffle=True)
ly.init(module, val_data=DataLoader(samples(120, 90 + site), 60), loss=F.cross_entropy)

trainer = L.Trainer(
    max_epochs=1,  # of one round
    accelerator="cpu",
    precision="bf16-mixed",
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
ly.patch(trainer)
while ly.running():
    trainer.fit(module, train_loader)
