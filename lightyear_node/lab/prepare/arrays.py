"""What the preparations share: splits by group, reading images, JPEG files in one array."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightyear_node.errors import ConfigError
from lightyear_node.lab.tasks.prepared import FIXED_SEED, TEST, TRAIN, VAL

Arrays = dict[str, NDArray[Any]]
Prepared = dict[str, Arrays]
"""The arrays of each file, by its path below the data directory."""

VAL_SHARE = 0.1
TEST_SHARE = 0.2


def found(folder: Path, pattern: str) -> list[Path]:
    """Return the files that match, sorted; raise if there is none."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise ConfigError(
            f"{folder}: there is no {pattern}", hint="docs/data.md describes the source's layout"
        )
    return files


def split_by_group(client: NDArray[np.uint8], group: NDArray[Any]) -> NDArray[np.uint8]:
    """Assign about 10 % of each client to validation and 20 % to test, in whole groups."""
    split = np.full(len(client), TRAIN, dtype=np.uint8)
    for number in np.unique(client):
        mine = client == number
        wanted = {TEST: TEST_SHARE * mine.sum(), VAL: VAL_SHARE * mine.sum()}
        order = np.random.default_rng((FIXED_SEED, int(number))).permutation(np.unique(group[mine]))
        for name in order:
            rows = mine & (group == name)
            # To the first part that this group does not make too large.
            for part, missing in wanted.items():
                if rows.sum() <= missing + 0.5:
                    split[rows] = part
                    wanted[part] -= rows.sum()
                    break
    return split


def read_image(path: Path, mode: str, size: tuple[int, int] | None = None) -> NDArray[np.uint8]:
    """Read an image as gray (`L`) or `RGB`, resized to (width, height) by averaging."""
    try:
        from PIL import Image
    except ModuleNotFoundError as problem:
        raise ConfigError("preparing images needs Pillow", hint="pip install pillow") from problem
    with Image.open(path) as opened:
        image = opened.convert(mode)
    if size is not None:
        image = image.resize(size, Image.Resampling.BOX)
    return np.asarray(image, dtype=np.uint8)


def resized(image: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BOX), dtype=np.uint8)


def jpeg_array(images: Sequence[NDArray[np.uint8]], quality: int) -> Arrays:
    """JPEG files one after the other, `jpeg`, and where each begins, `offset`."""
    from PIL import Image

    files = []
    for image in images:
        buffer = BytesIO()
        Image.fromarray(image).save(buffer, "JPEG", quality=quality, subsampling=0)
        files.append(np.frombuffer(buffer.getvalue(), dtype=np.uint8))
    ends = np.cumsum([0, *(len(file) for file in files)], dtype=np.int64)
    return {"jpeg": np.concatenate(files), "offset": ends}


def names(words: Sequence[str]) -> NDArray[np.bytes_]:
    """Text is stored as bytes."""
    return np.array([word.encode() for word in words])


def save(out: Path, prepared: Prepared) -> list[Path]:
    written = []
    for relative, arrays in prepared.items():
        path = out / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
        written.append(path)
    return written
