"""The daemon's side of learning: asks the worker, files what it produced, tries again when it dies.

Weights pass through here only as names.  A worker that dies is replaced and the job repeated; jobs
are pure functions of files, so doing one twice gives the same bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightyear_node.errors import StoreError, WorkerDied, WorkerError
from lightyear_node.home import State
from lightyear_node.ledger import Work
from lightyear_node.records import Digest, Harm, Opened, PeerName, Round, Verdict
from lightyear_node.store import Store, Stored
from lightyear_node.worker.handle import Worker
from lightyear_node.worker.jobs import Candidate, verdict_from_plain

TRIES = 3
BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True)
class OpenedModel:
    opened: Opened
    initial: Stored
    header: bytes
    """The first bytes of every update of this model: names, shapes and types as they travel."""
    wire_raw_bytes: int
    """The size of every update."""
    home_schema: Digest
    """Of the model as it is kept here, in full."""

    @property
    def schema(self) -> Digest:
        """What two sites compare to know that their updates fit."""
        return _schema(self.header)


class Learner:
    def __init__(
        self,
        worker: Worker,
        state: State,
        on_death: Callable[[str, str], None],
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._worker = worker
        self._state = state
        self._on_death = on_death
        self._warn = warn
        self._opened: Opened | None = None

    async def open(self) -> OpenedModel:
        """Build the user's task and write the model before round 0."""
        models = self._state.models
        with _scratch(models, models) as (scratch, wire_header):
            # Whoever tries again, for want of space, has the task built already.
            self._opened = self._opened or Opened(**await self._worker.open())
            answer = await self._worker.call(
                "initial", out=str(scratch), wire_header=str(wire_header)
            )
            initial = await _adopt(models, scratch)
            return OpenedModel(
                self._opened,
                initial,
                header=wire_header.read_bytes(),
                wire_raw_bytes=answer["wire_raw_bytes"],
                home_schema=_schema(_header(models.path(initial.digest))),
            )

    async def train(self, round: Round, base: Digest, carry: Digest | None) -> Work:
        try:
            return await self._train(round, base, carry)
        except StoreError:
            # What this training has left in memory must not be where the next attempt begins.
            await self._worker.stop()
            raise

    async def _train(self, round: Round, base: Digest, carry: Digest | None) -> Work:
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
        return Work(
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
        work: Work,
        before: Digest,
        peers: Sequence[tuple[PeerName, Digest, int]],
        rule_state: Mapping[str, Any],
    ) -> tuple[tuple[Verdict, ...], Mapping[str, Any]]:
        """A verdict for each peer, and what the rule wants to know again in the next round."""
        answer = await self._do(
            "judge",
            round=round,
            own=str(self._state.updates.path(work.own)),
            before=str(self._state.models.path(before)),
            carry=str(self._state.carry.path(work.carry)),
            peers=[
                self._candidate(peer, digest, samples).to_plain() for peer, digest, samples in peers
            ],
            state=dict(rule_state),
        )
        return tuple(verdict_from_plain(plain) for plain in answer["verdicts"]), answer["state"]

    async def merge(
        self, round: Round, work: Work, accepted: Sequence[tuple[PeerName, Digest, float]]
    ) -> tuple[Digest, Mapping[str, float], Harm | None]:
        """The new model, its metrics, and what measuring it before it was kept has found."""
        with _scratch(self._state.models) as (scratch,):
            answer = await self._do(
                "merge",
                round=round,
                own=str(self._state.updates.path(work.own)),
                carry=str(self._state.carry.path(work.carry)),
                accepted=[
                    {**self._candidate(peer, digest).to_plain(), "weight": weight}
                    for peer, digest, weight in accepted
                ],
                out=str(scratch),
            )
            stored = await _adopt(self._state.models, scratch)
        harm = Harm.from_plain(answer["harm"]) if answer["harm"] else None
        return stored.digest, answer["metrics"], harm

    def _candidate(self, peer: PeerName, digest: Digest, samples: int = 0) -> Candidate:
        return Candidate(peer, str(self._state.updates.path(digest)), samples, digest)

    async def _do(self, job: str, **arguments: Any) -> dict[str, Any]:
        for attempt in range(1, TRIES + 1):
            try:
                return await self._worker.call(job, **arguments)
            except WorkerError as problem:
                if attempt == TRIES:
                    raise
                # A task that raised gets a fresh process too: it may have been left in any state.
                if not isinstance(problem, WorkerDied):
                    await self._worker.stop()
                self._on_death(problem.reason, str(problem))
                await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
        raise AssertionError("the last attempt returns or raises")


def _schema(header: bytes) -> Digest:
    return Digest(hashlib.sha256(header).hexdigest())


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


@contextlib.contextmanager
def _scratch(*stores: Store) -> Iterator[list[Path]]:
    """Names for a job's files; whatever was not adopted is gone afterwards, half written or not."""
    paths = [store.scratch_path() for store in stores]
    try:
        yield paths
    finally:
        for store, path in zip(stores, paths, strict=True):
            store.clear_scratch(path)


async def _adopt(store: Store, scratch: Path) -> Stored:
    """Hashing and syncing a large file takes a while; the loop must go on turning."""
    return await asyncio.to_thread(store.adopt, scratch)
