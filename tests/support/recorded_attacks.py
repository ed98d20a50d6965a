"""Messages of the known attacks in one small federation of which two sites collude.

The colluders call every attack in every round but send their honest updates, so that all attacks
see the same models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from lightyear_node.config.federation import RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.errors import LightyearError
from lightyear_node.lab.malfunction_plugins import AttackContext, load_plugin
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.lab.simulate import GivenFunctions, simulate
from lightyear_node.lab.simulation_records import SimulationResult, SimulationSpec
from lightyear_node.learning.weights import Layout, load_into
from lightyear_node.types import PeerName
from lightyear_node.worker.task import Task

Tensors = dict[str, Tensor]
A, B, C, D = (PeerName(f"site-{letter}") for letter in "abcd")
COLLUDERS = (B, D)
GIVEN = MalfunctionConfig(kind="mine:attack")
SPEC = SimulationSpec(
    sites=[A, B, C, D],
    rounds=2,
    seed=5,
    rule=RuleConfig(),
    task=TaskConfig(entry="tests.support.tiny_task:build"),
    malfunctions=dict.fromkeys(COLLUDERS, GIVEN),
)
"""The first honest site by name, which attacks choose as their victim, is A."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What one colluder saw and computed in one round."""

    update: Tensors
    context: AttackContext
    messages: Mapping[str, Tensors]


@dataclass
class AttackRecorder:
    """Calls these malfunctions, each twice; keeps their first message, and errors in its place."""

    malfunctions: Mapping[str, MalfunctionConfig]
    seen: dict[tuple[PeerName, int], Seen] = field(default_factory=dict)
    errors: dict[str, LightyearError] = field(default_factory=dict)
    unequal: list[str] = field(default_factory=list)
    """Malfunctions whose second message differs from the first."""

    def __call__(self, update: Tensors, context: AttackContext) -> Tensors:
        messages = {}
        for name, malfunction in self.malfunctions.items():
            plugin, layout = load_plugin(malfunction), Layout.of(update)
            try:
                messages[name] = copied(plugin.corrupted(update, context, layout))
                if not equal(plugin.corrupted(update, context, layout), messages[name]):
                    self.unequal.append(name)
            except LightyearError as error:
                self.errors[name] = error
        fixed = replace(
            context,
            start=copied(context.start),
            honest={name: copied(one) for name, one in context.honest.items()},
            colluders={name: copied(one) for name, one in context.colluders.items()},
        )
        self.seen[context.site, context.round] = Seen(copied(update), fixed, messages)
        return update


def recorded(malfunctions: Mapping[str, MalfunctionConfig], **changes: Any) -> AttackRecorder:
    recorder = AttackRecorder(malfunctions)
    with_attack(recorder, **changes)
    return recorder


def with_attack(attack: Callable[..., Any], **changes: Any) -> SimulationResult:
    return simulate(replace(SPEC, **changes), functions=GivenFunctions(attack=attack))


def named(kind: str, **options: Any) -> MalfunctionConfig:
    return MalfunctionConfig(kind=kind, options=options).checked()


def copied(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(bool((one[n] == other[n]).all()) for n in one)


def context_of(update: Tensors, **fields: Any) -> AttackContext:
    """A context made by hand, of a site B without others unless given."""
    empty: dict[str, Any] = {
        "site": B, "round": 0, "rounds": 1, "seed": 0, "start": update, "colluders": {},
        "honest": {}, "task": None, "train": None,
    }  # fmt: skip
    return AttackContext(**{**empty, **fields})


def network_with(task: Task, weights: Mapping[str, Tensor]) -> nn.Module:
    assert not isinstance(task.model, nn.Module)
    model = task.model()
    load_into(model, weights)
    return model.eval()
