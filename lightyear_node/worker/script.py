"""Runs a training script in the worker: the verbs of `lightyear_node.training` under a node.

The script runs in the main thread, inside the job `open`.  `init` answers that job; `running`
serves jobs until one asks for training; `receive` and `send` begin and end the round of that job.
"""

from __future__ import annotations

import contextlib
import os
import random
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy
from torch import Tensor, nn

from lightyear_node.errors import ConfigError, InvalidTask, TaskFailed
from lightyear_node.types import Check
from lightyear_node.worker.error_redaction import redacted
from lightyear_node.worker.job_types import ExchangeSummary, RoundFiles, rehearsed
from lightyear_node.worker.pipe import WorkerJob
from lightyear_node.worker.rehearsal import ScriptRehearsal
from lightyear_node.worker.script_state import ScriptState
from lightyear_node.worker.script_values import (
    checked_metrics,
    checked_samples,
    copy_tensors,
    modes_kept,
    plain_model,
    refuse_other_tensors,
    shapes_of,
)
from lightyear_node.worker.step_counter import StepCounter
from lightyear_node.worker.stop_signal import StopSignal
from lightyear_node.worker.task import Task
from lightyear_node.worker.training_state import UnsaveableValue
from lightyear_node.worker.verb_order import LOOP_HINT, Stage, VerbOrder

if TYPE_CHECKING:
    from lightyear_node.worker.site import LocalSite

STEP_HINT = "train with an optimizer of torch between `receive` and `send`"

_current: ScriptSession | None = None


def current_session() -> ScriptSession | None:
    """The session of the script that this process runs; None without a node."""
    return _current


class ScriptSession:
    """Carries out the verbs.  `open_site` is called with a task and a device."""

    def __init__(
        self,
        opening: WorkerJob,
        next_job: Callable[[], WorkerJob],
        answer: Callable[[WorkerJob], None],
        open_site: Callable[..., LocalSite],
        device: str,
        rounds: int,
        full_errors: bool = False,
    ) -> None:
        self._job: WorkerJob | None = opening
        """The job that waits for the script: `open`, then `train`."""
        self._next_job = next_job
        self._answer = answer
        self._open_site = open_site
        self._device = device
        self.rounds = rounds
        self.order = VerbOrder()
        self._state = ScriptState()
        self.ended: BaseException | None = None
        """Why the script trains no more; None while it runs."""
        self._stop = StopSignal()
        self._opened_site: LocalSite | None = None
        self._shapes: Mapping[str, tuple[int, ...]] = {}
        self._local: Mapping[str, Tensor] = {}
        """The tensors that are not exchanged, as they were at the last `send`."""
        self._files: RoundFiles | None = None
        self._steps = StepCounter()
        self._full_errors = full_errors
        self._rehearsal: ScriptRehearsal | None = None
        """Set while `check` tries the script."""
        self._measured: tuple[list[Check], ExchangeSummary] | None = None

    @property
    def _site(self) -> LocalSite:
        assert self._opened_site is not None  # `VerbOrder` has checked that `init` was called
        return self._opened_site

    @property
    def model(self) -> nn.Module | None:
        """The model that `init` got."""
        return self._opened_site.model if self._opened_site is not None else None

    # The verbs.

    def init(self, model: nn.Module | Callable[[], nn.Module], **described: Any) -> nn.Module:
        """Build the site from the script's model and data, and answer the job `open`."""
        self.order.check("init", Stage.STARTED)
        given = plain_model(model) if isinstance(model, nn.Module) else model
        task = Task(
            model=given,
            optimizer=lambda parameters: self._state,  # type: ignore[arg-type,return-value]
            train_data=(),
            train_round=_script_trains,
            **described,
        )
        self._state.task = task
        with modes_kept(given):
            site = self._opened_site = self._open_site(task, device=self._device_for(given))
        if site.has_personal_model:
            raise InvalidTask(
                "the federation's rule trains a second, personal model, which a script cannot",
                hint="build a `Task` (`task.entry`), or agree on another rule",
            )
        if site.has_shadow:
            raise InvalidTask(
                "`rule.shadow` trains a second model, which a script cannot",
                hint="build a `Task` (`task.entry`), or set `shadow: false` under `rule` in"
                " node.yaml",
            )
        self._shapes = shapes_of(site.model)
        self._succeed(asdict(site.opened()))
        return model if isinstance(model, nn.Module) else site.model

    def state(self, *objects: Any, **named: Any) -> None:
        self._state.add(*objects, **named)

    def running(self) -> bool:
        """Serve jobs until one asks for training; False if the node stops."""
        self.order.check("running", Stage.WAITING)
        site = self._site
        copy_tensors(self._local, site.model)  # the script may have used the model since
        while (job := self._stop.wait(self._next_job)) is not None:
            if job.name == "train":
                self._job, self._files = job, RoundFiles.from_plain(job.arguments)
                self.order.round, self.order.stage = self._files.round, Stage.GIVEN
                self._stop.release()
                return True
            if job.name == "rehearse":
                self._begin_rehearsal(job)
                return True
            with modes_kept(site.model):
                self._stop.serve(job, self._answer)
            if job.name == "merge":
                self._stop.watch()
        return False

    def receive(self, model: nn.Module) -> None:
        """Load the model and the state objects, and set the seeds."""
        self.order.check("receive", Stage.GIVEN)
        target = plain_model(model)
        refuse_other_tensors(self._shapes, target)
        if self._rehearsal is not None:
            self._rehearsal.begin(target)
            self.order.stage = Stage.TRAINING
            return
        assert self._files is not None
        assert self._job is not None
        self._site.begin_round(self._files)
        if target is not self._site.model:
            copy_tensors(self._site.model.state_dict(), target)
        for parameter in target.parameters():
            parameter.grad = None  # as in a process that has just started
        seed = self._site.round_seed(self._files.round)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        self._steps.start(self._job.progress, self._state.steps)
        self.order.stage = Stage.TRAINING

    def send(
        self,
        model: nn.Module,
        *,
        metrics: Mapping[str, Any] | None = None,
        samples: int | None = None,
    ) -> None:
        """Write the trained model and the state objects, and answer the job `train`."""
        self.order.check("send", Stage.TRAINING)
        source, site = plain_model(model), self._site
        refuse_other_tensors(self._shapes, source)
        if self._rehearsal is not None:
            raise TaskFailed("training took no step of an optimizer", hint=STEP_HINT)
        assert self._files is not None
        if source is not site.model:
            copy_tensors(source.state_dict(), site.model)
        if samples is not None:
            self._state.samples = checked_samples(samples)
        numbers = checked_metrics(metrics) if metrics is not None else None
        self._state.steps = self._steps.stop()
        site.model.to(site.device)  # a trainer may have moved it
        try:
            with modes_kept(site.model):
                trained = site.end_round(self._files, metrics=numbers)
        except UnsaveableValue as problem:
            where = problem.path.removeprefix("shared.optimizer.objects.")
            raise InvalidTask(
                f"`state`: {where} is a {problem.kind}, which cannot be saved", hint=problem.hint
            ) from None
        self._local = {name: tensor.clone() for name, tensor in site.local_tensors().items()}
        # Not before: code after the script's loop would take the initial model for the result.
        self._stop.watch()
        self._succeed(asdict(trained))

    def progress(self, done: int, total: int) -> None:
        if self._job is not None:
            self._steps.report(done, total)

    # The process.

    def end(self, problem: BaseException | None) -> None:
        """The script has ended, with this exception or by itself."""
        self._steps.stop()
        if self._stop.received:
            if problem is not None:
                raise problem
            sys.exit(0)
        if problem is None or isinstance(problem, SystemExit):
            problem = self._early_end(problem.code if problem is not None else 0)
        self.ended = problem
        job, self._job = self._job, None
        if job is not None and self._rehearsal is not None and self._measured is not None:
            checks, exchange = self._measured
            job.succeed(rehearsed([self._rehearsal.end(problem), *checks], exchange))
        elif job is not None:
            job.fail(problem)
        else:
            print(f"the script ended: {redacted(problem, full=False)}", file=sys.stderr)

    def _begin_rehearsal(self, job: WorkerJob) -> None:
        """Measure what `check` asks for, then let the script train until its first step."""
        self._job, self._rehearsal = job, ScriptRehearsal(full=self._full_errors)
        with modes_kept(self._site.model):
            self._measured = self._site.rehearse(full=self._full_errors, train=False)
        self.order.round, self.order.stage = 0, Stage.GIVEN

    def _early_end(self, code: object) -> TaskFailed:
        how = "ended" if code in (None, 0) else f"ended with exit code {code}"
        match self.order.stage:
            case Stage.STARTED:
                when = "without `init`"
            case Stage.WAITING if self.order.round is None:
                when = "before its first round: `running` was not called"
            case Stage.WAITING:
                when = f"after round {self.order.round}, before the last round of the federation"
            case _:
                when = f"in round {self.order.round}, before `send`"
        return TaskFailed(f"the script {how} {when}", hint=LOOP_HINT)

    def _succeed(self, answer: dict[str, Any]) -> None:
        assert self._job is not None
        self.order.stage = Stage.WAITING
        job, self._job = self._job, None
        job.succeed(answer)

    def _device_for(self, model: nn.Module | Callable[[], nn.Module]) -> str:
        """Where node.yaml says; `auto` leaves the script's model where it is."""
        if self._device != "auto" or not isinstance(model, nn.Module):
            return self._device
        first = next(model.parameters(), None)
        return str(first.device) if first is not None else "cpu"


def run_script(session: ScriptSession, path: Path, arguments: Sequence[str]) -> None:
    """Run the file as `python FILE ARGUMENTS` does; `session` carries out its verbs."""
    global _current
    _current = session
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    problem: BaseException | None = None
    try:
        if not path.is_file():
            raise ConfigError(
                f"task.script: there is no file {path}",
                hint="a relative path starts at the folder of node.yaml",
            )
        runpy.run_path(str(path), run_name="__main__")
    except SyntaxError as raised:
        place = f"{Path(raised.filename or str(path)).name}:{raised.lineno}"
        problem = ConfigError(f"task.script: {place}: {raised.msg}", hint="correct that line")
    except BaseException as raised:  # the user's code may raise anything, or exit
        problem = raised
    finally:
        _current = None
    if session.order.in_child:
        _end_child(problem)
    session.end(problem)


def _end_child(problem: BaseException | None) -> NoReturn:
    """End a process that the script has forked: it must not take jobs."""
    if problem is None or isinstance(problem, SystemExit):
        code = problem.code if problem is not None else 0
        status = code if isinstance(code, int) else int(code is not None)
    else:
        about = redacted(problem, full=False)
        print(f"{about}; this ended a process that the script has forked", file=sys.stderr)
        status = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _script_trains(*_: object) -> None:
    raise TaskFailed("a script's training cannot be called from outside it")
