"""Random changes of training images, as in the paper's experiment with skin lesions.

Each image is cropped, scaled, rotated, sheared and made brighter or darker on its own.  All
movements together are one affine map, so that pixels are interpolated once.  Every random number
comes from torch's global generator, which the worker seeds for each round.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

CROP = 200 / 224
"""Side of the random crop as a share of the image's; the crop is enlarged to the image's size."""
SCALE = 0.07
ROTATION = math.radians(50)
SHEAR = 0.1
BRIGHTNESS = 0.15
CONTRAST = 0.1
"""Limits of the changes, those of FLamby's Fed-ISIC2019: the paper names the changes, not their
strength.  The shear is in pixels per pixel: FLamby's 0.1 is in degrees, which moves nothing at
these resolutions."""

CHANCE = 0.5
"""Probability of each change but the crop, which every image gets."""


def augmented(images: Tensor) -> Tensor:
    """Square images of 0 … 1, (n, channels, side, side), each changed on its own; again 0 … 1."""
    return _recoloured(_moved(images))


def _moved(images: Tensor) -> Tensor:
    """Crop, scale, rotate and shear; what lies outside the image is its reflection."""
    n = len(images)
    zoom = CROP / (1 + _drawn(n, SCALE))
    angle, shear_x, shear_y = _drawn(n, ROTATION), _drawn(n, SHEAR), _drawn(n, SHEAR)
    shift = (1 - CROP) * _uniform(n, 2)  # the crop's centre, with the image from −1 to 1
    sine, cosine = angle.sin(), angle.cos()
    rotation = torch.stack([cosine, -sine, sine, cosine], dim=1).view(n, 2, 2)
    ones = torch.ones(n)
    shear = torch.stack([ones, shear_x, shear_y, ones], dim=1).view(n, 2, 2)
    places = torch.cat([zoom.view(n, 1, 1) * rotation @ shear, shift.view(n, 2, 1)], dim=2)
    grid = functional.affine_grid(places, list(images.shape), align_corners=False)
    return functional.grid_sample(
        images, grid, mode="bilinear", padding_mode="reflection", align_corners=False
    )


def _recoloured(images: Tensor) -> Tensor:
    """Change contrast, about the image's mean, together with brightness."""
    n = len(images)
    happens = (torch.rand(n) < CHANCE).float()
    contrast, brightness = CONTRAST * _uniform(n) * happens, BRIGHTNESS * _uniform(n) * happens
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    changed = mean + (images - mean) * (1 + contrast.view(n, 1, 1, 1)) + brightness.view(n, 1, 1, 1)
    return changed.clamp(0, 1)


def _drawn(n: int, limit: float) -> Tensor:
    """One number for each image, uniform in ±limit, or 0 where the change does not happen."""
    return limit * _uniform(n) * (torch.rand(n) < CHANCE)


def _uniform(*shape: int) -> Tensor:
    """Uniform in −1 … 1."""
    return 2 * torch.rand(*shape) - 1
