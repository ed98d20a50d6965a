"""Models may return tensors, tuples, dictionaries or objects, and may have several heads."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightyear_node.errors import InvalidTask
from lightyear_node.learning import (
    FinalLayer,
    FinalLayerKind,
    Validation,
    exchanged,
    find_final_layers,
    ntk_agreement,
)
from lightyear_node.learning.forward import KeywordInputs
from lightyear_node.learning.outputs import predictions


@dataclass
class Answer:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()


class ModelOutput(OrderedDict[str, Any]):
    """A mapping whose entries are attributes too, as in Hugging Face's library."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


Named = namedtuple("Named", ["logits", "features"])


class Network(nn.Module):
    """A trunk with two heads; `form` makes the output of what the heads return."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 8)
        self.branch = nn.Linear(4, 8)
        self.first = nn.Linear(8, 3)
        self.second = nn.Linear(8, 2)
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.first(self.trunk(x).relu()), self.second(self.branch(x).relu()))


ONE_HEAD: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda a, b: a,
    "tuple of one": lambda a, b: (a,),
    "dictionary with logits": lambda a, b: {"logits": a, "hidden": (b,), "loss": None},
    "model output": lambda a, b: ModelOutput(loss=b.sum(), logits=a),
    "dataclass": lambda a, b: Answer(a, (b,)),
    "named tuple": lambda a, b: Named(a, b),
    "list with None": lambda a, b: [None, a],
}


def network(form: Callable[[Tensor, Tensor], Any], seed: int = 0) -> Network:
    torch.manual_seed(seed)
    return Network(form)


def batches(seed: int = 5) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(3, (size,), generator=generator))
        for size in (7, 5)
    ]


@pytest.mark.parametrize("form", ONE_HEAD)
def test_a_prediction_is_found_in_every_form_of_output(form: str) -> None:
    """Agreement and loss equal those of the network that returns the tensor itself."""
    plain, wrapped = network(ONE_HEAD["tensor"]), network(ONE_HEAD[form])
    [layer] = find_final_layers(wrapped, batches()[0])
    assert (layer.name, layer.kind) == ("first", FinalLayerKind.LINEAR)
    results = []
    for model in (plain, wrapped):
        validation = Validation(model, batches())
        validation.set_reference(exchanged(model))
        results.append(validation.measure(exchanged(network(ONE_HEAD["tensor"], seed=1))))
        assert validation.chance.level == pytest.approx(math.log(3))
    assert results[0] == results[1]
    assert 0 < results[0].agreement < 1


@pytest.mark.parametrize(
    ("choice", "layer"),
    [
        ("second", "second"),
        ("first", "first"),
        (lambda output: output["second"] - 0.0, "second"),
    ],
)
def test_the_task_chooses_the_prediction(choice: Any, layer: str) -> None:
    model = network(lambda a, b: {"first": a, "second": b, "text": "none"})
    [found] = find_final_layers(model, batches()[0], None, choice)
    assert found.name == layer
    score = ntk_agreement(model, model, batches(), output=choice)
    assert score == pytest.approx(1.0)


def test_an_index_chooses_from_a_tuple_but_not_from_a_tensor() -> None:
    """Some models return further outputs in training only."""
    pair, alone = torch.zeros(2, 3), torch.ones(2, 4)
    assert predictions((pair, alone), 1)[""] is alone
    assert predictions(alone, 1)[""] is alone


def test_each_head_has_its_own_agreement_and_the_smallest_decides() -> None:
    def both(a: Tensor, b: Tensor) -> Any:
        return {"organ": a, "tumour": b}

    ours, theirs = network(both), network(both)
    theirs.branch.reset_parameters()
    scores = {
        head: ntk_agreement(ours, theirs, batches(), head=head) for head in ("first", "second")
    }
    assert scores["first"] == pytest.approx(1.0)
    assert scores["second"] < 0.95
    assert ntk_agreement(ours, theirs, batches()) == scores["second"]
    assert ntk_agreement(ours, theirs, batches(), output="organ") == scores["first"]
    layers = find_final_layers(ours, batches()[0])
    assert [(one.entry, one.name) for one in layers] == [("organ", "first"), ("tumour", "second")]


def test_a_head_that_overflows_leaves_no_score() -> None:
    ours, theirs = network(lambda a, b: (a, b)), network(lambda a, b: (a, b))
    with torch.no_grad():
        theirs.branch.weight.fill_(math.inf)
    assert math.isnan(ntk_agreement(ours, theirs, batches()))


def test_networks_with_different_numbers_of_heads_cannot_be_compared() -> None:
    ours, theirs = network(lambda a, b: (a, b)), network(lambda a, b: a)
    with pytest.raises(InvalidTask, match="2 and 1 heads"):
        ntk_agreement(ours, theirs, batches())


def test_the_loss_of_several_heads_gets_the_whole_output_and_dictionary_labels() -> None:
    seen: list[Any] = []

    def loss(output: dict[str, Tensor], labels: dict[str, Tensor]) -> Tensor:
        seen.append((output, labels))
        first = functional.cross_entropy(output["organ"], labels["organ"])
        return first + functional.mse_loss(output["tumour"], labels["size"])

    model = network(lambda a, b: {"organ": a, "tumour": b})
    labelled = [(x, {"organ": y, "size": torch.ones(len(x), 2)}) for x, y in batches()]
    validation = Validation(model, labelled, loss=loss)
    validation.set_reference(exchanged(model))
    seen.clear()
    result = validation.measure(exchanged(model))
    assert result.loss == pytest.approx(validation.own_loss)
    # Once per batch, although each of two heads takes a pass.
    assert [set(output) for output, _ in seen] == [{"organ", "tumour"}] * 2
    with torch.no_grad():
        expected = sum(float(loss(model(x), y)) * len(x) for x, y in labelled) / 12
    assert result.loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda a, b: "text", "returned str, not a tensor"),
        (lambda a, b: (a, "text"), "entry '1' of the model's output is str"),
        (lambda a, b: {"a": a, "all": a.sum()}, "entry 'all' of the model's output is one number"),
        (lambda a, b: {}, "has no tensor"),
        (lambda a, b: (a, b.argmax(1)), "entry '1' of the model's output depends on no layer"),
    ],
)
def test_an_unclear_output_is_explained(form: Any, words: str) -> None:
    with pytest.raises(InvalidTask, match=words) as caught:
        find_final_layers(network(form), batches()[0])
    assert "Task(output=...)" in str(caught.value.hint)


@pytest.mark.parametrize("choice", ["nowhere", 7])
def test_a_choice_that_finds_nothing_is_explained(choice: Any) -> None:
    model = network(lambda a, b: {"organ": a, "tumour": b})
    with pytest.raises(InvalidTask, match="finds nothing") as caught:
        find_final_layers(model, batches()[0], None, choice)
    assert "it has organ, tumour" in str(caught.value.hint)


class Volume(nn.Module):
    def __init__(self, dimensions: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
        self.body = conv(1, 4, 3, padding=1)
        self.head = conv(4, 2, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.body(x).relu())}


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_signals_images_and_volumes_are_scored_alike(dimensions: int) -> None:
    shape = (6,) * dimensions
    torch.manual_seed(0)
    ours, theirs = Volume(dimensions), Volume(dimensions)
    data = [(torch.randn(5, 1, *shape), torch.randint(2, (5, *shape)))]
    [layer] = find_final_layers(ours, data[0])
    assert layer == FinalLayer("head", FinalLayerKind.CONV, "")
    validation = Validation(ours, data)
    validation.set_reference(exchanged(ours))
    assert validation.measure(exchanged(ours)).agreement == pytest.approx(1.0)
    assert 0 < validation.measure(exchanged(theirs)).agreement < 1
    assert validation.chance.level == pytest.approx(math.log(2))


class Keyed(nn.Module):
    """Takes its inputs by name; its last layer has a closed form only without `activation`."""

    def __init__(self, activation: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 3)
        self.activation = activation

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor, scale: float = 1.0) -> Any:
        words = self.words(input_ids) * attention_mask.unsqueeze(-1) * scale
        logits = self.head(words.sum(1))
        return ModelOutput(logits=logits.tanh() if self.activation else logits)


@pytest.mark.parametrize("activation", [False, True])
def test_inputs_by_name_are_scored_with_and_without_a_closed_form(activation: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = Keyed(activation), Keyed(activation)
    inputs = KeywordInputs(
        input_ids=torch.randint(10, (6, 5)),
        attention_mask=torch.tensor([[1, 1, 1, 1, 0]] * 3 + [[1, 1, 0, 0, 0]] * 3),
        scale=2.0,
    )
    data = [(inputs, torch.randint(3, (6,)))]
    [layer] = find_final_layers(ours, data[0])
    assert (layer.kind is FinalLayerKind.GENERAL) == activation
    assert ntk_agreement(ours, ours, data) == pytest.approx(1.0)
    assert 0 < ntk_agreement(ours, theirs, data) < 0.99
