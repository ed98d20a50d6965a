"""Random changes of training images: reproducible, of each image on its own, within limits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightyear_node.errors import ConfigError
from lightyear_node.lab.tasks.augmentation import CROP, augmented
from lightyear_node.worker.task import Task

SIDE = 48


def seeded(seed: int, images: Tensor) -> Tensor:
    torch.manual_seed(seed)
    return augmented(images)


def ramp(n: int) -> Tensor:
    """The value of a pixel is its column, 0.25 … 0.75, and so tells where it was."""
    return (0.25 + 0.5 * (torch.arange(SIDE) + 0.5) / SIDE).expand(n, 3, SIDE, SIDE)


def test_the_seed_determines_every_bit() -> None:
    images = torch.rand(8, 3, SIDE, SIDE)
    first, again, other = (seeded(seed, images) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_shape_type_and_range_stay_and_the_input_is_not_modified() -> None:
    images = torch.randint(0, 2, (40, 3, SIDE, SIDE)).float()
    before = images.clone()
    changed = augmented(images)
    assert torch.equal(images, before)
    assert (changed.shape, changed.dtype) == (images.shape, torch.float32)
    assert 0 <= float(changed.min()) < float(changed.max()) <= 1


def test_every_image_is_changed_in_its_own_way() -> None:
    changed = augmented(torch.rand(1, 3, SIDE, SIDE).expand(20, -1, -1, -1))
    for index in range(20):
        for other in range(index):
            assert not torch.allclose(changed[index], changed[other], atol=0.01)


def test_channels_are_moved_together() -> None:
    changed = augmented(torch.rand(10, 1, SIDE, SIDE).expand(-1, 3, -1, -1))
    assert torch.equal(changed[:, 0], changed[:, 1])
    assert torch.equal(changed[:, 0], changed[:, 2])


def test_an_image_of_one_colour_changes_its_brightness_in_half_of_the_cases() -> None:
    changed = augmented(torch.full((400, 3, 8, 8), 0.5)).flatten(1)
    assert torch.allclose(changed, changed[:, :1])  # a reflection adds no border
    shifts = changed[:, 0] - 0.5
    assert float(shifts.abs().max()) == pytest.approx(0.15, abs=0.01)
    assert float((shifts.abs() < 1e-4).float().mean()) == pytest.approx(0.5, abs=0.1)


def test_images_are_cropped_and_turned_by_up_to_fifty_degrees() -> None:
    """The slope of a ramp, measured around the centre, shows direction and enlargement."""
    changed = augmented(ramp(600))[:, 0]
    middle = slice(SIDE // 2 - 6, SIDE // 2 + 6)
    patch = changed[:, middle, middle]
    right, down = patch.diff(dim=2).mean(dim=(1, 2)), patch.diff(dim=1).mean(dim=(1, 2))
    size = torch.hypot(right, down) / (0.5 / SIDE)
    assert size.median().item() == pytest.approx(CROP, rel=0.03)
    assert 0.7 < float(size.min()) < float(size.max()) < 1.2
    angle = torch.atan2(down, right).rad2deg()
    assert 45 < float(angle.abs().max()) < 60  # and the shear
    assert float((angle.abs() < 0.5).float().mean()) == pytest.approx(0.25, abs=0.1)
    assert float(angle.mean()) == pytest.approx(0, abs=5)


Built = Callable[..., Task]


def test_augmentation_changes_the_training_images_of_skin_lesions_only(built: Built) -> None:
    plain, changed = (built("isic", 2, train_samples=40, augment=on) for on in (False, True))
    for one, other in ((plain.val_data, changed.val_data), (plain.test_data, changed.test_data)):
        assert one is not None
        assert other is not None
        for (x, y), (same_x, same_y) in zip(one, other, strict=True):
            assert torch.equal(x, same_x)
            assert torch.equal(y, same_y)

    def batches(task: Task) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(3)
        return list(task.train_data)

    first, again = batches(changed), batches(changed)
    assert all(torch.equal(x, same) for (x, _), (same, _) in zip(first, again, strict=True))
    (stored, labels), (x, y) = batches(plain)[0], first[0]
    assert torch.equal(y, labels)
    assert x.shape == stored.shape
    assert not torch.equal(x, stored)
    assert (x - stored).abs().mean() < 0.25  # still the same pictures


def test_augmentation_is_off_unless_it_is_asked_for(built: Built) -> None:
    assert built("isic", 0).train_data.augment is None  # type: ignore[attr-defined]


def test_all_skin_images_can_be_scaled_to_the_size_of_the_small_set(built: Built) -> None:
    task = built("isic", 5, full=True, side=64, train_samples=6)
    x, _ = next(iter(task.train_data))
    assert x.shape == (6, 3, 64, 64)
    larger, _ = next(iter(built("isic", 5, full=True).val_data))
    smaller, _ = next(iter(task.val_data))
    means = [images.mean(dim=(1, 2, 3)) for images in (larger, smaller)]
    assert torch.allclose(*means, atol=2 / 255)
    for wrong in ({"side": 64}, {"side": 0, "full": True}):
        with pytest.raises(ConfigError, match="side"):
            built("isic", 5, **wrong)
