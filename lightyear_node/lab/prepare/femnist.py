"""FEMNIST: LEAF's JSON files, with whole writers given to eight clients."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightyear_node.lab.prepare.arrays import Prepared, found, names, split_by_group
from lightyear_node.lab.tasks.femnist import CLIENTS, FILE

SIDE = 28
CLASSES = string.digits + string.ascii_uppercase + string.ascii_lowercase


def prepare(source: Path) -> Prepared:
    """`source` holds LEAF's `train` and `test` folders; they are pooled."""
    by_writer: dict[str, dict[bytes, int]] = {}
    for path in (*found(source, "train/*.json"), *found(source, "test/*.json")):
        for writer, samples in json.loads(path.read_text(encoding="utf-8"))["user_data"].items():
            images = np.rint(255 * np.array(samples["x"])).astype(np.uint8)
            kept = by_writer.setdefault(writer, {})
            # An image of a writer that is in two files is used once.
            kept |= zip((image.tobytes() for image in images), samples["y"], strict=True)
    writers = sorted(by_writer)
    counts = [len(by_writer[name]) for name in writers]
    writer = np.repeat(np.arange(len(writers), dtype=np.int16), counts)
    client = _dealt(counts)[writer]
    pixels = b"".join(image for name in writers for image in by_writer[name])
    return {
        FILE: {
            "images": np.frombuffer(pixels, np.uint8).reshape(-1, SIDE, SIDE),
            "labels": np.array([y for n in writers for y in by_writer[n].values()], np.uint8),
            "writer": writer,
            "client": client,
            "split": split_by_group(client, np.arange(len(client))),
            "writer_names": names(writers),
            "classes": names(list(CLASSES)),
        }
    }


def _dealt(counts: list[int]) -> NDArray[Any]:
    """Give each writer, the largest first, to the client that has the fewest images."""
    client = np.zeros(len(counts), dtype=np.uint8)
    totals = np.zeros(CLIENTS, dtype=np.int64)
    for number in np.argsort(counts, kind="stable")[::-1]:
        client[number] = totals.argmin()
        totals[client[number]] += counts[number]
    return client
