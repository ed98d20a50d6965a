"""Worker jobs as typed functions: sends a job, stores its output, retries when the worker dies.

Weights pass through here only as file names.  A dead worker is replaced and the job repeated; jobs
are pure functions of files, so repeating one gives the same bytes.  Where a job that reads peers'
files keeps failing, the files are tried in smaller groups, so that a file that kills or hangs the
worker costs only its own peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightyear_node.errors import (
    StoreError,
    TooManyFiles,
    WorkerDied,
    WorkerError,
    WorkerSilent,
)
from lightyear_node.node.worker_process import WorkerProcess
from lightyear_node.storage import safetensors_header
from lightyear_node.storage.blobs import BlobStore, StoredBlob
from lightyear_node.storage.file_descriptors import exhaustion_raised
from lightyear_node.storage.journal_memory import TrainingResult
from lightyear_node.storage.state_directory import StateDirectory
from lightyear_node.types import (
    Check,
    Digest,
    Harm,
    Mark,
    Opened,
    PeerName,
    Reason,
    Round,
    Verdict,
    Worth,
)
from lightyear_node.worker.bad_file_search import Trials, TriedFiles, trials
from lightyear_node.worker.job_types import CandidateFile, ExchangeSummary, verdict_from_plain

TRIES = 3
TRIES_WITH_PEERS = 2
"""Attempts of a job that reads peers' files, before they are tried apart; no retry of a hang."""
BACKOFF_S = 1.0
JUDGING_SILENCE_S_MIN = 60.0
JUDGING_SILENCE = 3.0
"""A judging worker may be silent for this multiple of what judging took before, and at least for
the minimum."""

Answer = TypeVar("Answer")
Peer = TypeVar("Peer", bound=tuple[Any, ...])


@dataclass(frozen=True, slots=True)
class OpenedModel:
    opened: Opened
    initial: StoredBlob
    header: bytes
    """The header of every update of this model: names, shapes and element types on the wire."""
    wire_raw_bytes: int
    """The size of every update."""
    home_schema: Digest
    """The schema of the stored model, in full precision."""

    @property
    def schema(self) -> Digest:
        """The digest that two sites compare to know that their updates are compatible."""
        return _schema(self.header)


@dataclass(frozen=True, slots=True)
class MergedModel:
    model: Digest
    metrics: Mapping[str, float]
    harm: Harm | None
    """The result of the merge check."""
    worth: Worth | None = None
    """Comparison with the model that never merges, if there is one."""
    left_out: tuple[PeerName, ...] = ()
    """Accepted peers whose files cannot be merged."""


class WorkerJobs:
    def __init__(
        self,
        worker: WorkerProcess,
        state: StateDirectory,
        on_death: Callable[[str, str], None],
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._worker = worker
        self._state = state
        self._on_death = on_death
        self._warn = warn
        self._opened: Opened | None = None
        self._unfit: dict[PeerName, Digest] = {}
        """Each peer's last file that killed or hung the worker."""
        self._judging_s = math.inf
        """Seconds per model of the last successful judging."""

    async def open(self) -> OpenedModel:
        """Build the user's task and write the model before round 0."""
        models = self._state.models
        with _scratch(models, models) as (scratch, wire_header):
            # A retry for lack of disk space finds the task already built.
            if self._opened is None:
                # An error of the task itself is not retried: it would occur again.
                self._opened = Opened(**await self._repeated(self._worker.open, WorkerDied))
            first = partial(
                self._worker.call, "initial", out=str(scratch), wire_header=str(wire_header)
            )
            answer = await self._repeated(first, WorkerDied)
            initial = await _adopt(models, scratch)
            return OpenedModel(
                self._opened,
                initial,
                header=_content(wire_header),
                wire_raw_bytes=answer["wire_raw_bytes"],
                home_schema=_schema(_header(models.path(initial.digest))),
            )

    async def rehearse(self) -> tuple[list[Check], ExchangeSummary]:
        """Try one training step, one batch and every metric; the worker cannot be used after it."""
        answer = await self._worker.call("rehearse")
        checks = [Check(**{**one, "mark": Mark(one["mark"])}) for one in answer["checks"]]
        exchange = answer["exchange"]
        return checks, ExchangeSummary(**{**exchange, "local": tuple(exchange["local"])})

    async def train(self, round: Round, base: Digest, carry: Digest | None) -> TrainingResult:
        try:
            return await self._train(round, base, carry)
        except StoreError:
            # The next attempt must not start from the state of this one.
            await self._worker.stop()
            raise

    async def stop(self) -> None:
        """End the worker; the next job starts another one."""
        await self._worker.stop()

    async def _train(self, round: Round, base: Digest, carry: Digest | None) -> TrainingResult:
        updates, carries = self._state.updates, self._state.carry
        with _scratch(updates, updates, carries) as (own, outgoing, carry_out):
            answer = await self._do(
                "train",
                round=round,
                base=str(self._state.models.path(base)),
                carry=str(carries.path(carry)) if carry else None,
                own=str(own),
                outgoing=str(outgoing),
                carry_out=str(carry_out),
            )
            if answer["clamped"]:
                self._warn(
                    f"round {round}: {answer['clamped']} weights were too large for the type that"
                    " `exchange.dtype` names, and were sent as its largest number"
                )
            stored = await _adopt(updates, own)
            sent = await _adopt(updates, outgoing) if outgoing.exists() else stored
            kept = await _adopt(carries, carry_out)
        return TrainingResult(
            own=stored.digest,
            outgoing=sent.digest,
            carry=kept.digest,
            raw_bytes=sent.raw_bytes,
            samples=answer["samples"],
            metrics=answer["metrics"],
        )

    async def judge(
        self,
        round: Round,
        work: TrainingResult,
        before: Digest,
        peers: Sequence[tuple[PeerName, Digest, int]],
        rule_state: Mapping[str, Any],
    ) -> tuple[tuple[Verdict, ...], Mapping[str, Any]]:
        """A verdict for each peer, and what the rule wants to know again in the next round."""
        fit = [one for one in peers if not self._is_unfit(one[0], one[1])]
        attempt = partial(self._judge, round, work, before, rule_state)
        found, problem = await self._apart(fit, attempt)
        if problem is not None and found.job_at_fault:
            raise problem
        assert found.result is not None
        for peer, digest, _ in found.culprits:
            self._unfit[peer] = digest
        left = {peer: Reason.UNSCORED for peer, _, _ in found.unclear}
        left |= {
            peer: Reason.MALFORMED for peer, digest, _ in peers if self._is_unfit(peer, digest)
        }
        verdicts = [verdict_from_plain(plain) for plain in found.result["verdicts"]]
        verdicts += [Verdict(peer, False, reason) for peer, reason in left.items()]
        return tuple(verdicts), found.result["state"]

    async def _judge(
        self,
        round: Round,
        work: TrainingResult,
        before: Digest,
        rule_state: Mapping[str, Any],
        peers: Sequence[tuple[PeerName, Digest, int]],
    ) -> dict[str, Any]:
        began = time.monotonic()
        answer = await self._do(
            "judge",
            tries=_tries(peers),
            silence_s=max(
                JUDGING_SILENCE_S_MIN, JUDGING_SILENCE * self._judging_s * (1 + len(peers))
            ),
            round=round,
            own=str(self._state.updates.path(work.own)),
            before=str(self._state.models.path(before)),
            carry=str(self._state.carry.path(work.carry)),
            peers=[
                self._candidate(peer, digest, samples).to_plain() for peer, digest, samples in peers
            ],
            state=dict(rule_state),
        )
        if peers:
            self._judging_s = (time.monotonic() - began) / (1 + len(peers))
        return answer

    def _is_unfit(self, peer: PeerName, digest: Digest) -> bool:
        return self._unfit.get(peer) == digest

    async def merge(
        self,
        round: Round,
        work: TrainingResult,
        accepted: Sequence[tuple[PeerName, Digest, float]],
        worth: Worth | None = None,
    ) -> MergedModel:
        """Merge the accepted updates, except those whose files cannot be merged.

        `worth` is that of the round before, for a site with a model that never merges.
        """
        found, problem = await self._apart(accepted, partial(self._merge, round, work, worth))
        if problem is not None and found.result is None:
            raise problem
        assert found.result is not None
        left_out = tuple(peer for peer, _, _ in (*found.culprits, *found.unclear))
        return replace(found.result, left_out=left_out)

    async def _merge(
        self,
        round: Round,
        work: TrainingResult,
        worth: Worth | None,
        accepted: Sequence[tuple[PeerName, Digest, float]],
    ) -> MergedModel:
        with _scratch(self._state.models) as (scratch,):
            answer = await self._do(
                "merge",
                tries=_tries(accepted),
                round=round,
                own=str(self._state.updates.path(work.own)),
                carry=str(self._state.carry.path(work.carry)),
                accepted=[
                    {**self._candidate(peer, digest).to_plain(), "weight": weight}
                    for peer, digest, weight in accepted
                ],
                out=str(scratch),
                worth=worth.to_plain() if worth is not None else None,
            )
            stored = await _adopt(self._state.models, scratch)
        harm = Harm.from_plain(answer["harm"]) if answer["harm"] else None
        found = Worth.from_plain(answer["worth"]) if answer["worth"] else None
        return MergedModel(stored.digest, answer["metrics"], harm, found)

    async def _apart(
        self, peers: Sequence[Peer], attempt: Callable[[Sequence[Peer]], Awaitable[Answer]]
    ) -> tuple[TriedFiles[Peer, Answer], WorkerError | None]:
        """The job's result for as many peers as possible, and its last failure."""
        sets: Trials[Peer, Answer] = trials(peers)
        some = next(sets)
        problem: WorkerError | None = None
        while True:
            answer = None
            try:
                answer = await attempt(some)
            except WorkerError as failed:
                problem = failed
            try:
                some = sets.send(answer)
            except StopIteration as end:
                return end.value, problem
            if answer is None and problem is not None:
                await self._replace(problem)

    def _candidate(self, peer: PeerName, digest: Digest, samples: int = 0) -> CandidateFile:
        return CandidateFile(peer, str(self._state.updates.path(digest)), samples, digest)

    async def _do(self, job: str, *, tries: int = TRIES, **arguments: Any) -> dict[str, Any]:
        ask = partial(self._worker.call, job, **arguments)
        return await self._repeated(ask, WorkerError, tries)

    async def _repeated(
        self,
        ask: Callable[[], Awaitable[dict[str, Any]]],
        retriable: type[WorkerError],
        tries: int = TRIES,
    ) -> dict[str, Any]:
        """Retry with exponential backoff while the worker fails with this kind of error."""
        for attempt in range(1, tries + 1):
            try:
                return await ask()
            except retriable as problem:
                hangs = isinstance(problem, WorkerSilent) and tries < TRIES
                if attempt == tries or hangs:
                    raise
                await self._replace(problem)
                await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")

    async def _replace(self, problem: WorkerError) -> None:
        """Start a new process also after an exception of the task: its state is undefined."""
        if not isinstance(problem, WorkerDied):
            await self._worker.stop()
        self._on_death(problem.reason, str(problem))


def _tries(peers: Sequence[Any]) -> int:
    return TRIES_WITH_PEERS if peers else TRIES


def _schema(header: bytes) -> Digest:
    return Digest(hashlib.sha256(header).hexdigest())


def _content(path: Path) -> bytes:
    with exhaustion_raised(str(path)):
        return path.read_bytes()


def _header(path: Path) -> bytes:
    with exhaustion_raised(str(path)), path.open("rb") as file:
        return safetensors_header.read(file)


@contextlib.contextmanager
def _scratch(*stores: BlobStore) -> Iterator[list[Path]]:
    """Names for a job's output files; what is not adopted is deleted afterwards."""
    paths = [store.scratch_path() for store in stores]
    try:
        yield paths
    finally:
        for store, path in zip(stores, paths, strict=True):
            store.clear_scratch(path)


async def _adopt(store: BlobStore, scratch: Path) -> StoredBlob:
    """Hash and sync a file in a thread, so that the event loop goes on."""
    while True:
        try:
            return await asyncio.to_thread(store.adopt, scratch)
        except TooManyFiles:  # training is not repeated for lack of a file descriptor
            await asyncio.sleep(BACKOFF_S)
