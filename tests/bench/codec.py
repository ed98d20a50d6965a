"""Measures encoding and decoding on one core, against zstd at level 1 and against copying.

Uses a real update (of FEMNIST, or else of the digits) and the previous one, repeated to 32 MB.
CPU time, best of several; MB are those of the float32 weights, even for bfloat16.  Prints one JSON
object.

    python tests/bench/codec.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import zstandard
from parts.trajectories import available, grid_of, recorded
from parts.weights import grid_for

from lightyear_node.transport.codec import decode_chunk, encode_chunk
from lightyear_node.types import CHUNK_BYTES

SIZE_BYTES = 32 << 20
REPEATS = 5


def best_s(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best


def content(path: Path, size: int) -> bytes:
    weights = path.read_bytes()[len(grid_of(path).header) :]
    return (weights * (size // len(weights) + 1))[:size]


def measure(files: list[Path], dtype: str, delta: bool) -> dict[str, float]:
    width = {"F32": 4, "BF16": 2}[dtype]
    grid = grid_for(SIZE_BYTES // 4, dtype)
    size = SIZE_BYTES // 4 * width
    raw, previous = (grid.header + content(path, size) for path in (files[-1], files[-2]))
    parts = [
        (raw[at : at + CHUNK_BYTES], previous[at : at + CHUNK_BYTES] if delta else None)
        for at in range(0, len(raw), CHUNK_BYTES)
    ]
    frames = [encode_chunk(grid, i, part, base) for i, (part, base) in enumerate(parts)]

    def encode() -> None:
        for index, (part, base) in enumerate(parts):
            encode_chunk(grid, index, part, base)

    def decode() -> None:
        for index, (frame, (_, base)) in enumerate(zip(frames, parts, strict=True)):
            decode_chunk(grid, index, frame, base)

    decoded = b"".join(decode_chunk(grid, i, f, parts[i][1]) for i, f in enumerate(frames))
    assert decoded == raw, "decoding must be exact"
    return {
        "share": round(sum(map(len, frames)) / SIZE_BYTES, 3),
        "encode_mb_s": round(SIZE_BYTES / 1e6 / best_s(encode)),
        "decode_mb_s": round(SIZE_BYTES / 1e6 / best_s(decode)),
    }


def plain(files: list[Path]) -> dict[str, float]:
    raw = content(files[-1], SIZE_BYTES)
    parts = [raw[at : at + CHUNK_BYTES] for at in range(0, len(raw), CHUNK_BYTES)]
    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    frames = [compressor.compress(part) for part in parts]
    return {
        "share": round(sum(map(len, frames)) / SIZE_BYTES, 3),
        "encode_mb_s": round(SIZE_BYTES / 1e6 / best_s(lambda: [*map(compressor.compress, parts)])),
        "decode_mb_s": round(
            SIZE_BYTES / 1e6 / best_s(lambda: [*map(decompressor.decompress, frames)])
        ),
    }


def main() -> None:
    task = available()[-1]
    with recorded(task, rounds=6) as files:
        runs = {
            "planes": measure(files, "F32", delta=False),
            "delta": measure(files, "F32", delta=True),
            "zstd_1": plain(files),
        }
        raw = content(files[-1], SIZE_BYTES)
    with recorded(task, "bfloat16", rounds=6) as files:
        runs["bfloat16_delta"] = measure(files, "BF16", delta=True)
    copy_mb_s = round(SIZE_BYTES / 1e6 / best_s(lambda: bytearray(raw)))
    ratios = {
        f"{name}_{step}_to_zstd_1": round(
            runs[name][f"{step}_mb_s"] / runs["zstd_1"][f"{step}_mb_s"], 2
        )
        for name in ("planes", "delta", "bfloat16_delta")
        for step in ("encode", "decode")
    }
    print(json.dumps({"bench": "codec", "task": task, **runs, "copy_mb_s": copy_mb_s, **ratios}))


if __name__ == "__main__":
    main()
