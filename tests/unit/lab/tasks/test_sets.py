"""Every prepared set: a client gets exactly the rows that the file assigns to it."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from lightyear_node.errors import ConfigError
from lightyear_node.lab.tasks import BUILT_IN
from lightyear_node.lab.tasks import isic as isic_task
from lightyear_node.lab.tasks.heart import columns
from lightyear_node.worker.task import Task

Built = Callable[..., Task]
Stored = Callable[[str], dict[str, np.ndarray]]

IMAGES = {  # shape of a sample, of its target, number of classes
    "femnist": ((1, 28, 28), (), 62),
    "pcam": ((3, 48, 48), (), 2),
    "isic": ((3, 64, 64), (), 8),
    "hc18": ((1, 64, 64), (64, 64), 2),
    "cxr_lungs": ((1, 64, 64), (64, 64), 2),
    "retina": ((1, 64, 64), (64, 64), 2),
}


def splits(task: Task) -> list[Any]:
    return [task.train_data, task.val_data, task.test_data]


def contents(batches: Any) -> Counter[tuple[bytes, bytes]]:
    """Every sample with its target, as bytes."""
    x = batches.dataset.numpy()
    if x.ndim == 4:
        x = x.transpose(0, 2, 3, 1)  # the order of the files
    y = batches.targets.numpy().astype(np.uint8)
    return Counter((a.tobytes(), b.tobytes()) for a, b in zip(x, y, strict=True))


def rows(file: dict[str, np.ndarray], mine: np.ndarray) -> Counter[tuple[bytes, bytes]]:
    targets = file["masks" if "masks" in file else "labels"]
    images = file["images"][mine]
    if "writer" in file:
        images = 255 - images  # the task inverts: ink is 1
    pairs = zip(images, targets[mine], strict=True)
    return Counter((a.tobytes(), b.tobytes()) for a, b in pairs)


@pytest.mark.parametrize("name", IMAGES)
def test_batches_have_the_shapes_that_the_networks_take(name: str, built: Built) -> None:
    shape, target_shape, classes = IMAGES[name]
    task = built(name, fraction=0.2)
    for batches in splits(task):
        for x, y in batches:
            assert x.shape == (len(x), *shape)
            assert x.dtype == torch.float32
            assert 0 <= float(x.min()) < float(x.max()) <= 1
            assert y.shape == (len(x), *target_shape)
            assert y.dtype == torch.int64
            assert 0 <= int(y.min()) <= int(y.max()) < classes


@pytest.mark.parametrize("name", ["femnist", "pcam", "hc18", "retina"])
def test_each_client_has_its_rows_with_the_splits_of_the_file(
    name: str, built: Built, stored: Stored
) -> None:
    file = stored(BUILT_IN[name].files[0])
    total = 0
    for client in range(BUILT_IN[name].clients):
        for part, batches in enumerate(splits(built(name, client))):
            mine = (file["client"] == client) & (file["split"] == part)
            assert contents(batches) == rows(file, mine)
            total += len(batches.dataset)
    assert total == len(file["images"])


def test_no_writer_has_two_clients(stored: Stored) -> None:
    file = stored("femnist/femnist.npz")
    pairs = set(zip(file["writer"].tolist(), file["client"].tolist(), strict=True))
    assert len(pairs) == len(np.unique(file["writer"])) == 540


def test_fetal_heads_can_be_split_by_size(built: Built, stored: Stored) -> None:
    file = stored("hc18_fetal/hc18_fetal.npz")
    for client in range(5):
        for part, batches in enumerate(splits(built("hc18", client, split_by="size"))):
            mine = (file["client_hc"] == client) & (file["split"] == part)
            assert contents(batches) == rows(file, mine)
    assert _in_two_splits(file["subject"], file["split"]) == 0
    with pytest.raises(ConfigError, match="hospital"):
        built("hc18", split_by="hospital")


def test_few_fetuses_are_in_two_clients(stored: Stored) -> None:
    file = stored("hc18_fetal/hc18_fetal.npz")
    assert len(np.unique(file["subject"])) == 806
    assert _in_two_splits(file["subject"], file["client"]) == 0
    assert _in_two_splits(file["subject"], file["client_hc"]) == 29
    sizes = [file["hc_mm"][file["client_hc"] == client] for client in range(5)]
    for smaller, larger in pairwise(sizes):
        assert smaller.max() <= larger.min()


def test_every_fetal_head_covers_a_part_of_the_image(stored: Stored) -> None:
    shares = stored("hc18_fetal/hc18_fetal.npz")["masks"].mean(axis=(1, 2))
    assert 0.01 < shares.min() < shares.max() < 0.9


def test_no_retina_is_in_two_splits(stored: Stored) -> None:
    file = stored("retina_vessels/retina_vessels.npz")
    assert _in_two_splits(file["source_image"], file["split"]) == 0


def _in_two_splits(groups: np.ndarray, split: np.ndarray) -> int:
    return sum(len(np.unique(split[groups == group])) > 1 for group in np.unique(groups))


@pytest.mark.parametrize("subset", ["paper200", "all"])
def test_x_rays_have_no_patient_in_two_splits_and_enough_validation(
    subset: str, built: Built, stored: Stored
) -> None:
    file = stored("cxr_lungs/cxr_lungs.npz")
    patients: dict[bytes, set[int]] = {}
    for image, patient in zip(file["images"], file["patient"], strict=True):
        patients.setdefault(image.tobytes(), set()).add(int(patient))
    kept = file["paper200"] == 1 if subset == "paper200" else file["client"] < 5
    for client in range(5):
        task = built("cxr_lungs", client, subset=subset)
        train, val, test = (contents(batches) for batches in splits(task))
        mine = kept & (file["client"] == client)
        assert train + val == rows(file, mine & (file["split"] != 2))
        assert test == rows(file, mine & (file["split"] == 2))
        assert val.total() >= 8
        assert val >= rows(file, mine & (file["split"] == 1))
        seen = [set().union(*(patients[image] for image, _ in part)) for part in (train, val, test)]
        assert sum(len(part) for part in seen) == len(set().union(*seen))
        if subset == "paper200":
            assert (train + val + test).total() == 40


def test_an_unknown_subset_is_refused(built: Built) -> None:
    with pytest.raises(ConfigError, match="paper300"):
        built("cxr_lungs", subset="paper300")


def test_skin_validation_is_a_fifth_of_the_training_split(built: Built, stored: Stored) -> None:
    file = stored("fed_isic2019/fed_isic2019_u8_64.npz")
    for client in range(6):
        train, val, test = (contents(batches) for batches in splits(built("isic", client)))
        mine = file["client"] == client
        assert (train.total(), val.total(), test.total()) == (128, 32, 40)
        assert train + val == rows(file, mine & (file["split"] == 0))
        assert test == rows(file, mine & (file["split"] == 2))


def test_skin_class_weights_are_those_of_the_full_set(stored: Stored) -> None:
    file = stored("fed_isic2019/fed_isic2019_jpeg84.npz")
    counts = np.bincount(file["labels"][file["split"] == 0])
    assert tuple(counts) == isic_task.CLASS_COUNTS
    assert isic_task.class_weights()[0].item() == pytest.approx(counts.sum() / counts[0])


@pytest.mark.parametrize(
    ("name", "relative", "side", "client", "sizes"),
    [
        ("pcam", "pcam_patches/pcam_jpeg96.npz", 96, 0, [417, 60, 120]),
        ("isic", "fed_isic2019/fed_isic2019_jpeg84.npz", 84, 5, [279, 70, 88]),
    ],
)
def test_full_size_images_are_those_of_the_jpeg_files(
    name: str,
    relative: str,
    side: int,
    client: int,
    sizes: list[int],
    built: Built,
    stored: Stored,
) -> None:
    from PIL import Image

    task = built(name, client, full=True)
    assert [len(batches.dataset) for batches in splits(task)] == sizes
    file = stored(relative)
    mine = np.flatnonzero((file["client"] == client) & (file["split"] == 2))
    expected: Counter[tuple[bytes, bytes]] = Counter()
    for row in mine:
        blob = file["jpeg"][file["offset"][row] : file["offset"][row + 1]].tobytes()
        image = np.asarray(Image.open(io.BytesIO(blob)))
        assert image.shape == (side, side, 3)
        expected[image.tobytes(), file["labels"][row].tobytes()] += 1
    assert contents(task.test_data) == expected


def test_full_size_images_can_be_shrunk(built: Built) -> None:
    whole, half = (built("pcam", 0, full=True, shrink=shrink).val_data for shrink in (1, 2))
    (large, labels), (small, same) = next(iter(whole)), next(iter(half))
    assert (large.shape[2:], small.shape[2:]) == ((96, 96), (48, 48))
    assert torch.equal(labels, same)
    means = torch.nn.functional.avg_pool2d(large, 2)
    assert torch.allclose(means, small, atol=1 / 255)


def test_the_split_of_the_hospitals_tables_is_fixed(built: Built, stored: Stored) -> None:
    file = stored("heart_disease/heart_disease.npz")
    names = [name.decode() for name in file["feature_names"]]
    for client, patients in enumerate((303, 294, 123, 200)):
        parts = splits(built("heart", client))
        sizes = [len(batches.dataset) for batches in parts]
        assert sum(sizes) == patients
        shares = [size / patients for size in sizes]
        assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.005)
        mine = file["client"] == client
        expected = Counter(
            (a.tobytes(), b.tobytes())
            for a, b in zip(
                columns(file["features"][mine], names).numpy(), file["labels"][mine], strict=True
            )
        )
        assert sum((contents(batches) for batches in parts), Counter()) == expected
        x, y = next(iter(parts[0]))
        assert (x.shape, y.shape) == ((16, 26), (16, 1))
        assert x.dtype == y.dtype == torch.float32


def test_missing_values_are_marked(stored: Stored) -> None:
    names = [n.decode() for n in stored("heart_disease/heart_disease.npz")["feature_names"]]
    one = np.array([[65, 1, 4, 0, np.nan, 0, 0, 140, 0, 0, 2, np.nan, 7]], dtype=np.float32)
    (row,) = columns(one, names).tolist()
    assert row[:5] == [1, 1, 1.5, 0, 0]
    assert row[13:] == [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0]
    assert one[0, 3] == 0  # the input is not modified


@pytest.mark.parametrize("name", [*IMAGES, "heart"])
def test_a_smaller_selection_is_fixed_and_part_of_the_whole(name: str, built: Built) -> None:
    whole = built(name, 1)
    few = built(name, 1, fraction=0.5, train_samples=7, val_samples=4, test_samples=3)
    again = built(name, 1, fraction=0.5, train_samples=7, val_samples=4, test_samples=3)
    assert [len(batches.dataset) for batches in splits(few)] == [7, 4, 3]
    for one, two, more in zip(splits(few), splits(again), splits(whole), strict=True):
        assert torch.equal(one.dataset, two.dataset)
        assert torch.equal(one.targets, two.targets)
        assert torch.equal(one.dataset, more.dataset[: len(one.dataset)])
    half = built(name, 1, fraction=0.5)
    for some, all_of_it in zip(splits(half), splits(whole), strict=True):
        assert len(some.dataset) == (len(all_of_it.dataset) + 1) // 2


@pytest.mark.parametrize("name", [*IMAGES, "heart"])
def test_a_wrong_argument_is_refused_by_name(name: str, built: Built) -> None:
    with pytest.raises(ConfigError, match="sites"):
        built(name, BUILT_IN[name].clients)
    for wrong in ({"epochs": 0}, {"lr": 0.0}, {"batch_size": 0}, {"train_samples": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            built(name, **wrong)
    if name != "heart":
        with pytest.raises(ConfigError, match="large"):
            built(name, network="large")
