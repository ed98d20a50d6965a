"""Metrics of torchmetrics' form, MONAI's own, and functions; failures name the metric."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from monai.metrics import ConfusionMatrixMetric, DiceMetric, ROCAUCMetric
from torch import Tensor, nn

from lightyear_node.errors import TaskFailed
from lightyear_node.worker.error_redaction import redacted
from lightyear_node.worker.metrics import CLASSES_NAMED_MAX, MetricMeter, numbers
from lightyear_node.worker.training import evaluate
from tests.support.tiny_site import task

CPU = torch.device("cpu")


class PerClassRecall(nn.Module):
    """A metric with the interface of torchmetrics, whose state is on a device."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.register_buffer("hits", torch.zeros(classes))
        self.register_buffer("counts", torch.zeros(classes))

    def reset(self) -> None:
        self.hits.zero_()
        self.counts.zero_()

    def update(self, preds: Tensor, target: Tensor) -> None:
        for index in range(len(self.hits)):
            self.hits[index] += ((preds.argmax(1) == index) & (target == index)).sum()
            self.counts[index] += (target == index).sum()

    def compute(self) -> Tensor:
        return self.hits / self.counts


def one_hot(index: Tensor) -> Tensor:
    return nn.functional.one_hot(index, 2).movedim(-1, 1)


def measure(metric: Any, *pairs: tuple[Tensor, Tensor]) -> dict[str, float]:
    meter = MetricMeter("it", metric, CPU)
    for prediction, target in pairs:
        meter.add(prediction, target, len(prediction))
    return meter.result()


LEFT = torch.tensor([[[1, 1, 0, 0]]])
"""One image of one row."""
MIDDLE = torch.tensor([[[0, 1, 1, 0]]])


def test_monais_dice_is_called_by_name_and_aggregated() -> None:
    dice = DiceMetric(include_background=False)
    pairs = [(one_hot(LEFT), one_hot(LEFT)), (one_hot(LEFT), one_hot(MIDDLE))]
    assert measure(dice, *pairs) == {"it": pytest.approx(0.75)}
    # The metric is reset before it is used again.
    assert measure(dice, pairs[0]) == {"it": pytest.approx(1.0)}


def test_a_dice_per_class_has_a_mean_and_a_name_for_each_class() -> None:
    found = measure(DiceMetric(reduction="mean_batch"), (one_hot(LEFT), one_hot(MIDDLE)))
    assert found == {"it": pytest.approx(0.5), "it_0": pytest.approx(0.5), "it_1": 0.5}


def test_the_count_of_valid_values_is_left_out() -> None:
    counted = DiceMetric(include_background=False, get_not_nans=True)
    pairs = [(one_hot(LEFT), one_hot(LEFT)), (one_hot(LEFT), one_hot(MIDDLE))]
    assert measure(counted, *pairs) == {"it": pytest.approx(0.75)}


def test_a_list_of_results_has_a_name_for_each() -> None:
    names = ["sensitivity", "precision"]
    both = ConfusionMatrixMetric(include_background=False, metric_name=names)
    found = measure(both, (one_hot(torch.tensor([1, 1, 0])), one_hot(torch.tensor([1, 0, 0]))))
    assert found == {"it": pytest.approx(0.75), "it_0": 1.0, "it_1": 0.5}


def test_monais_area_under_the_curve() -> None:
    scores = torch.tensor([[0.1], [0.6], [0.4], [0.9]])
    labels = torch.tensor([[0], [0], [1], [1]])
    assert measure(ROCAUCMetric(), (scores, labels)) == {"it": pytest.approx(0.75)}


def test_an_object_of_torchmetrics_form_and_a_class_without_samples() -> None:
    logits, labels = torch.eye(3)[[0, 1, 0]], torch.tensor([0, 1, 1])
    found = measure(PerClassRecall(3), (logits, labels))
    assert found["it"] == pytest.approx(0.75)  # the third class has no sample: NaN
    assert (found["it_0"], found["it_1"]) == (1.0, 0.5)
    assert math.isnan(found["it_2"])


def test_results_become_named_numbers() -> None:
    assert numbers("it", 3) == {"it": 3.0}
    assert numbers("it", {"a": torch.tensor(1.0), "b": 2}) == {"it_a": 1.0, "it_b": 2.0}
    assert numbers("it", torch.ones(1, 1)) == {"it": 1.0}
    assert list(numbers("it", torch.ones(CLASSES_NAMED_MAX + 1))) == ["it"]
    with pytest.raises(TaskFailed, match="`it` returned no number"):
        numbers("it", torch.ones(0))


def test_a_function_is_averaged_over_samples_and_its_entries() -> None:
    pairs = [(torch.zeros(3, 2), torch.zeros(3)), (torch.ones(1, 2), torch.ones(1))]
    assert measure(lambda logits, y: logits.mean(0), *pairs) == {"it": pytest.approx(0.25)}


def test_a_failing_metric_is_named_and_its_text_is_private() -> None:
    def broken(logits: Tensor, labels: Tensor) -> float:
        raise KeyError("patient-4711")

    with pytest.raises(TaskFailed) as caught:
        measure(broken, (torch.zeros(2, 2), torch.zeros(2)))
    assert redacted(caught.value, full=True) == "the metric `it` raised KeyError: 'patient-4711'"
    public = redacted(caught.value, full=False)
    assert public.startswith("the metric `it` raised KeyError (test_metrics.py:")


@pytest.mark.parametrize("metric", [DiceMetric(), ROCAUCMetric()])
def test_a_monai_metric_that_gets_other_shapes_is_named(metric: Any) -> None:
    pair = torch.ones(2, 2, 4, 4), torch.ones(2, 2, 5, 5)
    with pytest.raises(TaskFailed, match=r"the metric `it` raised \w+Error: .*"):
        measure(metric, pair)


def test_a_metric_that_cannot_be_called_is_an_error() -> None:
    with pytest.raises(TaskFailed, match="`it` is float, which cannot be called"):
        MetricMeter("it", 0.5, CPU)


def test_a_full_disk_stays_a_full_disk() -> None:
    def broken(logits: Tensor, labels: Tensor) -> float:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        measure(broken, (torch.zeros(2, 2), torch.zeros(2)))


def test_metric_inputs_and_the_inferer_prepare_what_metrics_get() -> None:
    seen: list[Any] = []

    def infer(x: Tensor, model: nn.Module) -> Tensor:
        seen.append(len(x))
        logits: Tensor = model(x)
        return logits * 0 + torch.tensor([0.0, 1.0, 0.0])

    prepared = task(
        inferer=infer,
        metric_inputs=lambda output, y: (output.argmax(1), y),
        metrics={"ones": lambda index, y: (index == 1).float().mean()},
    )
    found = evaluate(prepared, prepared.model(), prepared.val_data, CPU)  # type: ignore[operator]
    assert found["ones"] == 1.0
    assert seen == [96]
