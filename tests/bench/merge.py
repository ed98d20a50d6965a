"""Measures the memory of merging 2 and 12 peers.  Prints one JSON object.

A model of 100 MB in 25 tensors, from memory-mapped files, each merge in a new process: growth of
the peak resident memory, as a share of the model.

    python tests/bench/merge.py
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

TENSORS, ELEMENTS = 25, 1_000_000
PEERS = (2, 12)


def merge(folder: Path, peers: int) -> None:
    import torch

    from lightyear_node.learning import Layout, MergeShare, Weights, make_rule, write
    from lightyear_node.types import PeerName, Round

    torch.set_num_threads(1)
    shape = {f"layer{i:02d}.weight": torch.empty(1000, ELEMENTS // 1000) for i in range(TENSORS)}
    layout = Layout.of(shape)
    del shape
    for number in range(peers + 1):
        generator = torch.Generator().manual_seed(number)
        pairs = (
            (name, torch.randn(entry.shape, generator=generator))
            for name, entry in layout.entries.items()
        )
        write(folder / str(number), layout, pairs)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    models = [Weights(folder / str(number), layout) for number in range(peers + 1)]
    shares = [
        MergeShare(PeerName(f"peer-{number:02d}"), model, 1 / (peers + 1))
        for number, model in enumerate(models[1:])
    ]
    write(folder / "merged", layout, make_rule("lightyear").merge(models[0], shares, Round(3)))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"peers": peers, "grown_mb": round((after - before) / 1024, 1)}))


def main() -> None:
    if len(sys.argv) == 3:
        merge(Path(sys.argv[1]), int(sys.argv[2]))
        return
    found = []
    for peers in PEERS:
        with tempfile.TemporaryDirectory() as folder:
            answer = subprocess.run(
                [sys.executable, __file__, folder, str(peers)],
                capture_output=True,
                text=True,
                check=True,
            )
        found.append(json.loads(answer.stdout))
    model_mb = TENSORS * ELEMENTS * 4 / 2**20
    print(
        json.dumps(
            {
                "bench": "merge",
                "model_mb": round(model_mb, 1),
                "runs": found,
                "share_of_model": {
                    str(run["peers"]): round(run["grown_mb"] / model_mb, 3) for run in found
                },
            }
        )
    )


if __name__ == "__main__":
    main()
