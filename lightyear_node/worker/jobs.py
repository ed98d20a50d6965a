"""The worker's job loop: takes one job after the other from the daemon and runs it.

A task's training runs inside its job.  A script runs inside the job `open`, and takes further jobs
from the same loop whenever it waits for a round (`script`).  Torch is imported by the first job,
after the pipe's reader thread has started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.errors import ConfigError
from lightyear_node.types import Worth
from lightyear_node.worker.error_redaction import redact_uncaught
from lightyear_node.worker.job_types import (
    FULL_ERRORS,
    MEMORY_MAX,
    CandidateFile,
    RoundFiles,
    rehearsed,
    verdict_to_plain,
)
from lightyear_node.worker.memory_limit import limit_memory
from lightyear_node.worker.pipe import Answer, JobPipe, WorkerJob

if TYPE_CHECKING:
    from lightyear_node.worker.script import ScriptSession
    from lightyear_node.worker.site import LocalSite
    from lightyear_node.worker.task import Task

Progress = Callable[[int, int], None]
MakeSite = Callable[..., "LocalSite"]


def make_local_site(*arguments: Any, **settings: Any) -> LocalSite:
    from lightyear_node.worker.site import LocalSite

    return LocalSite(*arguments, **settings)


def serve(make_site: MakeSite = make_local_site) -> None:
    """Answer jobs until the daemon ends; `make_site` is called as `LocalSite` is."""
    full_errors = FULL_ERRORS in sys.argv
    memory_max = next(
        (int(one.removeprefix(MEMORY_MAX)) for one in sys.argv if one.startswith(MEMORY_MAX)), None
    )
    refusal: ConfigError | None = None
    try:
        if memory_max is not None:
            limit_memory(memory_max)
    except ConfigError as problem:
        refusal = problem
    if not full_errors:
        redact_uncaught()
    pipe = JobPipe(full_errors=full_errors, memory_max=memory_max)
    loop = JobLoop(pipe, make_site, full_errors=full_errors)
    while True:
        job = loop.next()
        if refusal is not None:
            job.fail(refusal)
        else:
            loop.answer(job)


class JobLoop:
    """Opens the site with the first job, then passes every job to it."""

    def __init__(self, pipe: JobPipe, make_site: MakeSite, *, full_errors: bool = False) -> None:
        self.next = pipe.next
        self._make_site = make_site
        self._full_errors = full_errors
        self._opened_site: LocalSite | None = None
        self._session: ScriptSession | None = None
        """The script that trains, if the task is one."""

    def answer(self, job: WorkerJob) -> None:
        if job.name == "open" and "script" in job.arguments:
            self._open_script(job, **job.arguments)
            return
        try:
            answer = self._run(job.name, job.progress, **job.arguments)
        except Exception as problem:  # the user's code may raise anything
            job.fail(problem)
        else:
            job.succeed(answer)

    def _run(self, job: str, progress: Progress, **arguments: Any) -> Answer:
        match job:
            case "open":
                return self._open(**arguments)
            case "initial":
                return self._initial(**arguments)
            case "rehearse":
                return self._rehearse()
            case "train":
                return self._train(progress, **arguments)
            case "judge":
                return self._judge(progress, **arguments)
            case "import_checkpoint":
                return self._import_checkpoint(**arguments)
            case "merge":
                return self._merge(**arguments)
        raise ValueError(f"no such job: {job}")

    def _check_script(self) -> None:
        """Raise why the script has ended: without it, there is no training."""
        if self._session is not None and self._session.ended is not None:
            raise self._session.ended

    @property
    def _site(self) -> LocalSite:
        if self._opened_site is None:
            raise ValueError("the first job must be `open`")
        return self._opened_site

    def _open(self, *, entry: str, args: dict[str, Any], **settings: Any) -> Answer:
        from lightyear_node.worker.task import load_task

        _prepare_torch(**settings)
        name, sites = settings["name"], settings["sites"]
        context = {
            "site_name": name,
            "site_index": sites.index(name),
            "site_count": len(sites),
            "seed": settings["seed"],
        }
        return asdict(self._open_site(settings, load_task(entry, args, context)).opened())

    def _open_script(
        self, job: WorkerJob, *, script: str, args: Sequence[str], **settings: Any
    ) -> None:
        """Run a script; it answers the job when it has described its model."""
        from lightyear_node.worker.script import ScriptSession, run_script

        _prepare_torch(**settings)
        open_site = partial(self._open_site, settings)
        about = settings["device"], settings["rounds"], self._full_errors
        self._session = ScriptSession(job, self.next, self.answer, open_site, *about)
        run_script(self._session, Path(script), args)

    def _open_site(self, settings: dict[str, Any], task: Task, **changed: Any) -> LocalSite:
        unused = {"sites", "threads"}
        self._opened_site = self._make_site(
            task,
            **{key: value for key, value in settings.items() if key not in unused}
            | {
                "rule": RuleConfig(**settings["rule"]),
                "exchange": ExchangeConfig(**settings["exchange"]),
                **changed,
            },
        )
        return self._opened_site

    def _initial(self, *, out: str, wire_header: str) -> Answer:
        """Write the model before round 0, and the header of every update (too long to answer)."""
        self._check_script()
        self._site.write_initial(Path(out))
        Path(wire_header).write_bytes(self._site.wire.header)
        return {"wire_raw_bytes": self._site.wire.file_bytes}

    def _rehearse(self) -> Answer:
        self._check_script()
        return rehearsed(*self._site.rehearse(full=self._full_errors))

    def _train(self, progress: Progress, **arguments: Any) -> Answer:
        self._check_script()
        files = RoundFiles.from_plain(arguments)
        return asdict(self._site.train(**asdict(files), progress=progress))

    def _import_checkpoint(self, *, path: str, out: str, as_peer: bool) -> Answer:
        refused = self._site.import_checkpoint(Path(path), Path(out), as_peer=as_peer)
        return {"refused": asdict(refused) if refused else None}

    def _judge(
        self,
        progress: Progress,
        *,
        round: int,
        own: str,
        before: str,
        carry: str | None,
        peers: list[dict[str, Any]],
        state: dict[str, Any],
    ) -> Answer:
        judged = self._site.judge(
            own=Path(own),
            before=Path(before),
            peers=[CandidateFile.from_plain(plain) for plain in peers],
            round=round,
            state=state,
            carry=Path(carry) if carry else None,
            progress=progress,
        )
        return {
            "verdicts": [verdict_to_plain(verdict) for verdict in judged.verdicts],
            "state": dict(judged.state),
        }

    def _merge(
        self,
        *,
        round: int,
        own: str,
        carry: str,
        accepted: list[dict[str, Any]],
        out: str,
        worth: dict[str, Any] | None = None,
    ) -> Answer:
        merged = self._site.merge(
            own=Path(own),
            accepted=[(CandidateFile.from_plain(peer), peer["weight"]) for peer in accepted],
            round=round,
            out=Path(out),
            carry=Path(carry),
            worth=Worth.from_plain(worth) if worth else None,
        )
        return asdict(merged) | {"worth": merged.worth.to_plain() if merged.worth else None}


def _prepare_torch(*, threads: int, seed: int, **_: Any) -> None:
    import torch

    if threads:
        torch.set_num_threads(threads)
    # Arithmetic on denormal numbers, which a peer could send, is a hundred times slower.
    torch.set_flush_denormal(True)
    torch.manual_seed(seed)
