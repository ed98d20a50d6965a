"""The order in which a training script calls the verbs, with a sentence for each mistake."""

from __future__ import annotations

import os
import threading
from enum import Enum

from lightyear_node.errors import TaskFailed

LOOP_HINT = (
    "write `init(...)` once, then `while running():` with `receive(model)`, the training and"
    " `send(model)` inside the loop"
)


class Stage(Enum):
    STARTED = "before `init`"
    WAITING = "between rounds"
    GIVEN = "after `running`, before `receive`"
    TRAINING = "between `receive` and `send`"


class VerbOrder:
    """Where a script is; `round` is the current or the last one."""

    def __init__(self) -> None:
        self.stage = Stage.STARTED
        self.round: int | None = None
        self._pid = os.getpid()

    @property
    def in_child(self) -> bool:
        return os.getpid() != self._pid

    def check(self, verb: str, wanted: Stage) -> None:
        """Raise `TaskFailed` unless `verb` may be called now."""
        if self.in_child:
            raise TaskFailed(
                f"`{verb}` was called in a process that the script has forked",
                hint="call it in the script's own process only",
            )
        if threading.current_thread() is not threading.main_thread():
            raise TaskFailed(
                f"`{verb}` was called in another thread", hint="call it in the main thread only"
            )
        if self.stage is not wanted:
            raise TaskFailed(self._mistake(verb, wanted), hint=LOOP_HINT)

    def _mistake(self, verb: str, wanted: Stage) -> str:
        where = "" if self.round is None else f"round {self.round}: "
        if wanted is Stage.STARTED:
            return "`init` was called twice"
        if self.stage is Stage.STARTED:
            return f"`{verb}` was called before `init`"
        match verb, self.stage:
            case "running", Stage.TRAINING:
                return f"{where}`running` was called again without `send`"
            case "running" | "send", Stage.GIVEN:
                return f"{where}`{verb}` was called without `receive`"
            case "receive", Stage.TRAINING:
                return f"{where}`receive` was called twice"
            case "send", Stage.WAITING if self.round is not None:
                return f"{where}`send` was called twice"
        return f"{where}`{verb}` was called outside a round"
