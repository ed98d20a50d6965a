"""Measures the cost of an agreement score.  Prints one JSON object.

The paper's FEMNIST network, one peer, n samples.  Alternating in one run:

    closed_s     the agreement with a prepared reference, one peer
    forward_s    a plain forward pass of that peer over the same batches
    jacobian_s   the same score, with the kernel from vmap(jacrev) on the final layer

CPU seconds of one thread, so that other load has little effect.  Medians; ratios are taken within
a repetition: `speedup` = jacobian / closed (goal ≥ 50), `overhead` = closed / forward
(goal ≤ 1.3).

    python tests/bench/agreement.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from lightyear_node.lab.tasks.networks import PaperCNN
from lightyear_node.learning import ReferenceKernels, find_final_layers

CLASSES = 62


def femnist_net() -> nn.Module:
    return PaperCNN(CLASSES).eval().requires_grad_(False)


def centred_kernel_by_jacobians(model: nn.Module, batches: list[Tensor]) -> Tensor:
    head = {name: p.detach() for name, p in model.named_parameters() if name.startswith("10.")}

    def logits(theta: dict[str, Tensor], x: Tensor) -> Tensor:
        output: Tensor = functional_call(model, theta, (x.unsqueeze(0),))
        return output[0]

    rows = []
    for batch in batches:
        jacobian = vmap(jacrev(logits), in_dims=(None, 0))(head, batch)  # (b, C, …) each
        rows.append(torch.cat([part.flatten(1) for part in jacobian.values()], dim=1))
    flat = torch.cat(rows)  # (n, C·|θ_L|)
    kernel = (flat @ flat.T / CLASSES).double()  # (n, n)
    kernel = kernel - kernel.mean(dim=0, keepdim=True)
    return kernel - kernel.mean(dim=1, keepdim=True)


def forward(model: nn.Module, batches: list[Tensor]) -> None:
    with torch.no_grad():
        for batch in batches:
            model(batch)


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--jacobian-repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ours, theirs = femnist_net(), femnist_net()
    batches = list(torch.split(torch.rand(options.samples, 1, 28, 28), options.batch))
    reference = ReferenceKernels(ours, batches, find_final_layers(ours, batches[0]))
    own = centred_kernel_by_jacobians(ours, batches)

    def by_jacobians() -> float:
        kernel = centred_kernel_by_jacobians(theirs, batches)
        return float((own * kernel).sum() / own.norm() / kernel.norm())

    closed: list[float] = []
    plain: list[float] = []
    slow: list[float] = []
    for repetition in range(options.repetitions + 1):
        forward(theirs, batches)  # warms up caches and allocator after the Jacobians
        times = (
            seconds(lambda: reference.agreement(theirs)),
            seconds(lambda: forward(theirs, batches)),
            seconds(by_jacobians) if repetition <= options.jacobian_repetitions else None,
        )
        if repetition == 0:
            continue  # warm-up
        closed.append(times[0])
        plain.append(times[1])
        if times[2] is not None:
            slow.append(times[2])
    print(
        json.dumps(
            {
                "bench": "agreement",
                "parameters": sum(p.numel() for p in ours.parameters()),
                "samples": options.samples,
                "classes": CLASSES,
                "threads": torch.get_num_threads(),
                "closed_s": round(statistics.median(closed), 5),
                "forward_s": round(statistics.median(plain), 5),
                "jacobian_s": round(statistics.median(slow), 5),
                "speedup": round(ratio(slow, closed), 1),
                "overhead": round(ratio(closed, plain), 3),
                "difference": abs(reference.agreement(theirs) - by_jacobians()),
            }
        )
    )


if __name__ == "__main__":
    main()
