"""Weights files of any size, and their chunk grids."""

from __future__ import annotations

import json
import random
import struct
from array import array
from pathlib import Path

from lightyear_node.transport.codec import ChunkGrid

WIDTHS = {"F32": 4, "BF16": 2}


def grid_for(elements: int, dtype: str = "F32") -> ChunkGrid:
    """The grid of a file with one tensor of so many elements."""
    offsets = [0, WIDTHS[dtype] * elements]
    text = json.dumps({"w": {"dtype": dtype, "shape": [elements], "data_offsets": offsets}})
    encoded = text.encode().ljust(-(-len(text) // 8) * 8)
    return ChunkGrid(struct.pack("<Q", len(encoded)) + encoded)


def write_weights(path: Path, grid: ChunkGrid, seed: int = 7) -> None:
    """Write normally distributed float32 values: only their exponents compress."""
    values = random.Random(seed)
    block = array("f", (values.gauss(0.0, 0.05) for _ in range(1 << 18))).tobytes()
    with path.open("wb") as file:
        file.write(grid.header)
        left = grid.raw_bytes - len(grid.header)
        while left > 0:
            # The same values, rotated: generating all would take longer than the benchmark.
            offset = 4 * values.randrange(1 << 18)
            file.write((block[offset:] + block[:offset])[:left])
            left -= len(block)
