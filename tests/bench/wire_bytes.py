"""Measures the size of an update on the wire, as a share of its weights as float32.

Real training: three sites with the default rule, on the digits and (if the prepared data exist) on
FEMNIST.  The first site's update of every round is encoded in full, as differences to the previous
round, and both in bfloat16.  Prints one JSON object; `steady` is the mean over the last quarter of
the rounds.

    python tests/bench/wire_bytes.py [--rounds N] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import zstandard
from parts.trajectories import available, grid_of, recorded

from lightyear_node.transport.codec import encode_chunk
from lightyear_node.types import CHUNK_BYTES

GOALS = {"delta": 0.65, "bfloat16_delta": 0.25}


def chunks(path: Path) -> list[bytes]:
    content = path.read_bytes()
    return [content[at : at + CHUNK_BYTES] for at in range(0, len(content), CHUNK_BYTES)]


def encoded_bytes(path: Path, base: Path | None) -> int:
    grid = grid_of(path)
    base_chunks = chunks(base) if base else [None] * grid.chunks
    return sum(
        len(encode_chunk(grid, index, raw, old))
        for index, (raw, old) in enumerate(zip(chunks(path), base_chunks, strict=True))
    )


def shares(task: str, rounds: int | None) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    with recorded(task, rounds=rounds) as files:
        weights = files[0].stat().st_size - len(grid_of(files[0]).header)
        plain = zstandard.ZstdCompressor(level=1)
        found["zstd_1"] = [len(plain.compress(path.read_bytes())) for path in files]
        found["planes"] = [encoded_bytes(path, None) for path in files]
        found["delta"] = [encoded_bytes(*pair) for pair in zip(files[1:], files, strict=False)]
    with recorded(task, "bfloat16", rounds) as files:
        found["bfloat16"] = [encoded_bytes(path, None) for path in files]
        pairs = zip(files[1:], files, strict=False)
        found["bfloat16_delta"] = [encoded_bytes(*pair) for pair in pairs]
    return {name: [round(size / weights, 3) for size in sizes] for name, sizes in found.items()}


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = [task for task in available() if task in report]
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(5 * len(tasks), 3.4), sharey=True)
    names = {
        "zstd_1": ("zstd only", "0.6"),
        "planes": ("planes", "tab:blue"),
        "delta": ("planes of differences", "tab:green"),
        "bfloat16": ("bfloat16: planes", "tab:orange"),
        "bfloat16_delta": ("bfloat16: differences", "tab:red"),
    }
    for axis, task in zip(axes if len(tasks) > 1 else [axes], tasks, strict=True):
        by_round = report[task]["by_round"]
        last = len(by_round["planes"])
        for name, (label, colour) in names.items():
            shares = by_round[name]
            axis.plot(range(last - len(shares), last), shares, label=label, color=colour)
        axis.set(title=task, xlabel="round", ylim=(0, 1))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("bytes on the wire,\nshare of float32")
    figure.axes[-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"bench": "wire_bytes", "goals": GOALS}
    for task in available():
        by_round = shares(task, options.rounds)
        steady = {
            name: round(sum(each[-(len(each) // 4) :]) / (len(each) // 4), 3)
            for name, each in by_round.items()
        }
        met = {name: steady[name] <= goal for name, goal in GOALS.items()}
        report[task] = {"steady": steady, "goal_met": met, "by_round": by_round}
    print(json.dumps(report))
    if options.plot:
        draw(report, options.plot)


if __name__ == "__main__":
    main()
