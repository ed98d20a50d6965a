"""Rows become batches: no sample is lost or repeated, and the selection is fixed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lightyear_node.errors import ConfigError
from lightyear_node.lab.tasks.prepared import (
    TRAIN,
    VAL,
    Batches,
    DataAmounts,
    check_site,
    choose,
    enlarge_validation,
    pixels,
)
from lightyear_node.worker.training import count_samples


def numbered(n: int, batch_size: int, *, shuffle: bool) -> Batches:
    return Batches(torch.arange(n).float(), torch.arange(n) * 10, batch_size, shuffle=shuffle)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("n", [0, 1, 3, 4, 5, 7, 8, 9])
def test_every_pass_has_every_sample_once(n: int, shuffle: bool) -> None:
    batches = numbered(n, 4, shuffle=shuffle)
    seen = list(batches)
    assert len(batches) == len(seen)
    assert count_samples(batches) == n
    x = torch.cat([torch.zeros(0), *(x for x, _ in seen)])
    y = torch.cat([torch.zeros(0, dtype=torch.long), *(y for _, y in seen)])
    assert torch.equal(x.sort().values, torch.arange(n).float())
    assert torch.equal(y, x.long() * 10)  # a sample keeps its target
    sizes = [len(x) for x, _ in seen]
    assert all(size in (3, 4, 5) for size in sizes) or n == 1
    assert sizes.count(1) == (n == 1)  # batch normalisation needs two samples


def test_torchs_seed_determines_the_order_of_each_pass() -> None:
    batches = numbered(50, 8, shuffle=True)

    def passes() -> list[torch.Tensor]:
        torch.manual_seed(5)
        return [torch.cat([x for x, _ in batches]) for _ in range(2)]

    first, second = passes()
    again = passes()
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, second)


def test_bytes_are_scaled_to_0_1_on_use_and_stored_as_bytes() -> None:
    stored = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    batches = Batches(stored, torch.zeros(1), 1)
    for _ in range(2):
        ((x, _),) = batches
        assert torch.equal(x, torch.tensor([[0, 0.2, 1]]))
    assert batches.dataset.dtype == torch.uint8


def test_only_the_inputs_of_a_batch_are_augmented() -> None:
    stored = torch.tensor([[0, 51, 255]], dtype=torch.uint8)
    batches = Batches(stored, torch.ones(1), 1, augment=lambda x: x + 1)
    for _ in range(2):
        ((x, y),) = batches
        assert torch.equal(x, torch.tensor([[1, 1.2, 2]]))
        assert torch.equal(y, torch.ones(1))
    assert torch.equal(batches.dataset, stored)


def test_channels_come_first() -> None:
    gray = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    colour = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 3, 4, 3)
    assert pixels(gray).shape == (2, 1, 3, 4)
    assert pixels(colour).shape == (2, 3, 3, 4)
    assert pixels(colour)[1, 2, 0, 3] == colour[1, 0, 3, 2]


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, float("nan")])
def test_an_invalid_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="fraction"):
        DataAmounts(fraction)


def test_other_invalid_amounts_are_refused() -> None:
    with pytest.raises(ConfigError, match="val_samples"):
        DataAmounts(val_samples=0)
    with pytest.raises(ConfigError, match="batch_size"):
        numbered(3, 0, shuffle=False)


SPLIT = np.array([0, 1, 2, 0] * 25, dtype=np.uint8)
MINE = np.arange(100) < 80


def test_without_limits_a_client_gets_all_of_its_rows_and_no_others() -> None:
    chosen = choose(SPLIT, MINE, 1, DataAmounts())
    for part, rows in enumerate(chosen):
        assert sorted(rows) == [row for row in range(80) if SPLIT[row] == part]


def test_a_smaller_selection_is_part_of_a_larger_one() -> None:
    whole = choose(SPLIT, MINE, 1, DataAmounts())
    half = choose(SPLIT, MINE, 1, DataAmounts(0.5))
    few = choose(SPLIT, MINE, 1, DataAmounts(0.5, train_samples=3, val_samples=500))
    assert [len(rows) for rows in whole] == [40, 20, 20]
    assert [len(rows) for rows in half] == [20, 10, 10]
    assert [len(rows) for rows in few] == [3, 10, 10]
    for large, small in ((whole, half), (half, few)):
        for more, fewer in zip(large, small, strict=True):
            assert fewer.tolist() == more[: len(fewer)].tolist()
    # Shuffled: the first rows of a file often belong to one writer or patient.
    assert few[TRAIN].tolist() != np.flatnonzero(MINE & (SPLIT == TRAIN))[:3].tolist()


def test_validation_grows_by_whole_groups_from_the_clients_training_split() -> None:
    patients = np.arange(100) // 8  # 4 training rows each
    larger = enlarge_validation(SPLIT, MINE, 26, patients, client=1)
    moved = np.flatnonzero(larger != SPLIT)
    assert len(moved) == 8  # 20 present, 26 wanted, four rows per patient
    assert (SPLIT[moved] == TRAIN).all()
    assert (larger[moved] == VAL).all()
    assert MINE[moved].all()
    for patient in np.unique(patients[moved]):
        assert not (MINE & (larger == TRAIN) & (patients == patient)).any()
    assert (enlarge_validation(SPLIT, MINE, 20, patients, client=1) == SPLIT).all()


@pytest.mark.parametrize(("index", "count"), [(5, 5), (-1, 5), (0, 6)])
def test_a_site_without_data_is_refused(index: int, count: int) -> None:
    with pytest.raises(ConfigError, match="data for 5 sites"):
        check_site("pcam", 5, index, count)


def test_fewer_sites_than_clients_are_allowed() -> None:
    assert check_site("pcam", 5, 4, 5) == 4
    assert check_site("pcam", 5, 1, 2) == 1
