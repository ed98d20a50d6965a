"""A vision transformer of Hugging Face: only its LoRA adapters and its classifier are exchanged.

A real one starts from pretrained weights: ViTForImageClassification.from_pretrained(...).
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

import lightyear_node.training as ly

parser = argparse.ArgumentParser()
parser.add_argument("--site", type=int, default=0)
site = parser.parse_args().site

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
config = ViTConfig(image_size=16, patch_size=4, intermediate_size=64, num_labels=3, **sizes)
adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])
model = get_peft_model(ViTForImageClassification(config), adapters)


def images(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """The site's own data, here synthetic: one channel is brighter than the others."""
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randn(count, 3, 16, 16, generator=draw)
    labels = torch.randint(3, (count,), generator=draw)
    pixels[torch.arange(count), labels] += 1
    return [{"pixel_values": x, "labels": y} for x, y in zip(pixels, labels, strict=True)]


def accuracy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    return float((logits.argmax(1) == labels).float().mean())


train_loader = DataLoader(images(120, 10 + site), 20, shuffle=True)
ly.init(
    model,
    val_data=DataLoader(images(60, 90 + site), 30),
    loss=lambda output, labels: output.loss,
    metrics={"accuracy": accuracy},
)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
progress = {"epochs": 0}
ly.state(optimizer, progress=progress)

while ly.running():
    ly.receive(model)
    model.train()
    for batch in train_loader:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    progress["epochs"] += 1
    print(f"epoch {progress['epochs']}, end of the round")
    ly.send(model)
