"""The verbs without a node: they check their order and arguments, and exchange nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lightyear_node.worker.script_state import ScriptState
from lightyear_node.worker.script_values import (
    checked_metrics,
    checked_samples,
    plain_model,
    refuse_other_tensors,
    shapes_of,
)
from lightyear_node.worker.verb_order import Stage, VerbOrder

NO_NODE = (
    "lightyear-node: no node has started this script, so it trains one round alone;"
    " `task: {script: ...}` in node.yaml runs it in a federation"
)


class StandaloneSession:
    rounds = 1

    def __init__(self) -> None:
        self._order = VerbOrder()
        self._state = ScriptState()
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self.model: nn.Module | None = None

    def init(self, model: nn.Module | Callable[[], nn.Module], **described: Any) -> nn.Module:
        self._order.check("init", Stage.STARTED)
        print(NO_NODE, file=sys.stderr)
        built = model if isinstance(model, nn.Module) else model()
        self.model = plain_model(built)
        self._shapes = shapes_of(self.model)
        self._order.stage = Stage.WAITING
        return built

    def state(self, *objects: Any, **named: Any) -> None:
        self._state.add(*objects, **named)

    def running(self) -> bool:
        """True once: there is one round."""
        self._order.check("running", Stage.WAITING)
        if self._order.round is not None:
            return False
        self._order.round, self._order.stage = 0, Stage.GIVEN
        return True

    def receive(self, model: nn.Module) -> None:
        self._order.check("receive", Stage.GIVEN)
        refuse_other_tensors(self._shapes, plain_model(model))
        self._order.stage = Stage.TRAINING

    def send(
        self,
        model: nn.Module,
        *,
        metrics: Mapping[str, Any] | None = None,
        samples: int | None = None,
    ) -> None:
        self._order.check("send", Stage.TRAINING)
        refuse_other_tensors(self._shapes, plain_model(model))
        if metrics is not None:
            checked_metrics(metrics)
        if samples is not None:
            checked_samples(samples)
        self._order.stage = Stage.WAITING

    def progress(self, done: int, total: int) -> None:
        pass
