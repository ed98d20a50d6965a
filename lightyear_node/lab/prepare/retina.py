"""Vessels of the retina: DRIVE, STARE and CHASE_DB1, cut into tiles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightyear_node.lab.prepare.arrays import (
    Prepared,
    found,
    names,
    read_image,
    resized,
    split_by_group,
)
from lightyear_node.lab.tasks.retina import FILE

WIDTH, TILE = 256, 64
FIELD_LEVEL = 25
"""Brightness from which a pixel belongs to the retina, not to the black border."""
FIELD_MIN = 0.6
SITES = ("DRIVE (NL)", "STARE (US)", "CHASE_DB1 (UK)")


def prepare(source: Path) -> Prepared:
    """`source` holds the folders `DRIVE`, `STARE` and `CHASE_DB1`."""
    tiles, masks, client, origin = [], [], [], []
    for number, (site, image, manual) in enumerate(_pairs(source)):
        photograph = read_image(image, "RGB")
        for tile, mask in _tiles(photograph, read_image(manual, "L") >= 128):
            tiles.append(tile)
            masks.append(mask)
            client.append(site)
            origin.append(number)
    owner = np.array(client, dtype=np.uint8)
    return {
        FILE: {
            "images": np.stack(tiles),
            "masks": np.stack(masks),
            "client": owner,
            "source_image": np.array(origin, dtype=np.uint8),
            "split": split_by_group(owner, np.array(origin)),
            "client_names": names(SITES),
        }
    }


def _pairs(source: Path) -> Iterator[tuple[int, Path, Path]]:
    """Every photograph with the first observer's vessels; DRIVE's test set has them, too."""
    for image in found(source / "DRIVE", "*/images/*.tif"):
        number = image.name.split("_")[0]
        [manual] = found(image.parents[1] / "1st_manual", f"{number}_manual1.gif")
        yield 0, image, manual
    for image in found(source / "STARE", "im[0-9][0-9][0-9][0-9].ppm"):
        yield 1, image, image.with_suffix(".ah.ppm")
    for image in found(source / "CHASE_DB1", "Image_*.jpg"):
        yield 2, image, image.with_name(f"{image.stem}_1stHO.png")


def _tiles(
    photograph: NDArray[np.uint8], vessels: NDArray[np.bool_]
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    field = photograph.max(axis=2) >= FIELD_LEVEL
    rows, columns = np.flatnonzero(field.any(axis=1)), np.flatnonzero(field.any(axis=0))
    crop = (slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
    height = round(WIDTH * (rows[-1] + 1 - rows[0]) / (columns[-1] + 1 - columns[0]))

    def scaled(plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return resized(np.ascontiguousarray(plane[crop]), (WIDTH, height))

    green = scaled(photograph[..., 1])
    inside, mask = (scaled(255 * plane.astype(np.uint8)) >= 128 for plane in (field, vessels))
    for top in range(0, height - TILE + 1, TILE):
        for left in range(0, WIDTH, TILE):
            here = (slice(top, top + TILE), slice(left, left + TILE))
            if inside[here].mean() >= FIELD_MIN:
                yield green[here], mask[here].astype(np.uint8)
