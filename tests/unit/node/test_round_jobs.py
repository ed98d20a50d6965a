"""Fetching, judging and merging with a real blob store, barrier and peer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from lightyear_node.config.node import DiskConfig
from lightyear_node.node.downloads import Downloads
from lightyear_node.node.round_jobs import RoundJobs
from lightyear_node.node.worker_jobs import MergedModel
from lightyear_node.protocol.durable_state import Decision
from lightyear_node.protocol.events import (
    Announced,
    Command,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    Judge,
    Judged,
    Merged,
)
from lightyear_node.protocol.parameters import Cause
from lightyear_node.storage.blobs import tree_digest
from lightyear_node.storage.disk_space import DiskSpace
from lightyear_node.storage.journal_memory import TrainingResult
from lightyear_node.transport.codec import encode_chunk
from lightyear_node.types import (
    CHUNK_BYTES,
    Digest,
    Generation,
    Manifest,
    PeerName,
    Reason,
    Round,
    SignedManifest,
    Update,
    Verdict,
)
from tests.support.barrier_bench import Bench
from tests.support.fake_peer import chunk, listed, sending
from tests.support.tls_sites import CONTENT, GRID, HEADER, MANIFEST, A, calling, flip, hostile
from tests.unit.node.test_retention import Room

pytestmark = pytest.mark.usefixtures("short_pauses")

B, C = PeerName("site-a"), PeerName("site-c")
"""The first is the site that `hostile` impersonates."""


@dataclass
class Content:
    """An update's bytes, as a peer has them."""

    raw: bytes = field(default_factory=lambda: HEADER + os.urandom(len(CONTENT) - len(HEADER)))

    @property
    def chunks(self) -> list[bytes]:
        return [self.raw[i : i + CHUNK_BYTES] for i in range(0, len(self.raw), CHUNK_BYTES)]

    @property
    def hashes(self) -> tuple[bytes, ...]:
        return tuple(sha256(one).digest() for one in self.chunks)

    @property
    def digest(self) -> Digest:
        return tree_digest(len(self.raw), self.hashes)


class FakeWorkerJobs:
    """Accepts every update."""

    def __init__(self) -> None:
        self.shown: list[list[PeerName]] = []

    async def judge(self, *given: Any) -> Any:
        peers = [peer for peer, _, _ in given[3]]
        self.shown.append(peers)
        return tuple(Verdict(peer, True, Reason.OK, weight=0.2) for peer in peers), {}

    async def merge(
        self, round: Round, work: TrainingResult, accepted: Sequence[Any], worth: Any
    ) -> MergedModel:
        self.shown.append([peer for peer, _, _ in accepted])
        return MergedModel(Digest("m" * 64), {}, None)


class Jobs:
    """The jobs of a real barrier; one peer is a server that sends what the test defines."""

    def __init__(self, folder: Path, client: Any, *, delta: bool = True) -> None:
        self.room = Room(folder, delta=delta)
        self.room.seal(0)
        self.bench = Bench((B, C), min_peers=1)
        self.commands: list[Command] = self.bench.start()
        self.manifests: dict[Digest, Manifest] = {}
        self.events: list[Event] = []
        self.worker_jobs = FakeWorkerJobs()
        self.observer = MagicMock()
        retention = self.room.retention
        inbox: Any = SimpleNamespace(put=self.events.append, hear=lambda event: None)
        shared: Any = (DiskSpace(folder, DiskConfig(), MagicMock()), self.observer, inbox)
        connections: Any = SimpleNamespace(fetch_slots=asyncio.Semaphore(4), clients={B: client})
        manifests: Any = SimpleNamespace(find=self.find)
        self.downloads = Downloads(
            self.bench.barrier, manifests, retention, connections, *shared, GRID
        )
        worker_jobs: Any = self.worker_jobs
        journal = self.room.round_journal
        self.round_jobs = RoundJobs(
            worker_jobs, self.downloads, journal, retention, *shared, MagicMock()
        )

    def find(self, update: Update) -> SignedManifest | None:
        found = self.manifests.get(update.digest)
        return SignedManifest(found, b"") if found else None

    def announce(self, content: Content, round: int, generation: int = 0) -> Update:
        update = Update(B, Generation(generation), Round(round), content.digest)
        self.manifests[update.digest] = replace(MANIFEST, update=update)
        self.commands += self.bench.tell(Announced(update))
        return update

    async def run(self) -> list[Event]:
        """Fetch what the barrier asks for, and pass the results to it."""
        wanted = [command for command in self.commands if isinstance(command, Fetch)]
        self.commands.clear()
        for command in wanted:
            await self.downloads.fetch(command.update)
        came, self.events[:] = list(self.events), []
        for event in came:
            self.commands += self.bench.tell(event)
        return came

    def kinds(self) -> tuple[int, int]:
        """The numbers of complete and partial files of peers."""
        updates = self.room.state.updates
        of_peers = len(updates.complete_files()) - len(self.room.round_journal.offered)
        return of_peers, len(updates.partial_files())

    def used(self) -> int:
        folder = self.room.state.updates.folder
        return sum(path.stat().st_size for path in folder.iterdir())


Serve = dict[str, Any]


def with_jobs(tmp_path: Path, scene: Callable[[Jobs, Serve], Any], **changed: Any) -> None:
    """`serving["fetch"]` is how the peer answers a fetch."""
    serving: Serve = {}

    async def fetch(request: Any, context: Any) -> None:
        await serving["fetch"](request, context)

    async def run() -> None:
        async with hostile(fetch) as address, calling(address, pinned=(A,)) as client:
            jobs = Jobs(tmp_path, client, **changed)
            try:
                await scene(jobs, serving)
            finally:
                jobs.room.state.close()

    asyncio.run(run())


def partly(content: Content, chunks: int) -> Callable[[Any, Any], Any]:
    """A peer that sends at most `chunks` chunks, beginning with the first requested one."""

    async def fetch(request: Any, context: Any) -> None:
        frames = [encode_chunk(GRID, i, raw) for i, raw in enumerate(content.chunks)]
        wanted = range(request.first_chunk, chunks)
        pieces = [chunk(i, frames[i]) for i in wanted]
        await sending(listed(sha256=b"".join(content.hashes)), *pieces)(request, context)

    return fetch


def wholly(content: Content) -> Callable[[Any, Any], Any]:
    return partly(content, len(content.chunks))


def test_one_partial_file_is_kept_per_peer(tmp_path: Path) -> None:
    async def scene(jobs: Jobs, serving: Serve) -> None:
        before = jobs.used()
        for round in range(8):
            content = Content()
            serving["fetch"] = partly(content, len(content.chunks) - 1)
            jobs.announce(content, 100 + round)
            [event] = await jobs.run()
            assert isinstance(event, FetchFailed)
            assert event.retriable
            assert jobs.kinds() == (0, 1)
            assert jobs.used() - before <= len(CONTENT)

    with_jobs(tmp_path, scene)


@pytest.mark.parametrize("delta", [True, False])
def test_only_complete_files_in_use_are_kept_per_peer(tmp_path: Path, delta: bool) -> None:
    """A new generation each time, since the barrier wants only one update of each."""

    async def scene(jobs: Jobs, serving: Serve) -> None:
        for generation in range(8):
            content = Content()
            serving["fetch"] = wholly(content)
            jobs.announce(content, 100, generation)
            [event] = await jobs.run()
            assert isinstance(event, Fetched)
            whole, parts = jobs.kinds()
            assert whole <= 2
            assert parts == 0

    with_jobs(tmp_path, scene, delta=delta)


def test_a_partial_file_is_resumed(tmp_path: Path) -> None:
    async def scene(jobs: Jobs, serving: Serve) -> None:
        content = Content()
        serving["fetch"] = partly(content, 2)
        update = jobs.announce(content, 100)
        await jobs.run()
        asked: list[int] = []

        async def rest(request: Any, context: Any) -> None:
            asked.append(request.first_chunk)
            await wholly(content)(request, context)

        serving["fetch"] = rest
        await jobs.downloads.fetch(update)
        assert asked == [2]
        assert jobs.room.state.updates.verify(update.digest)

    with_jobs(tmp_path, scene)


async def judged(jobs: Jobs, updates: Sequence[Update]) -> dict[PeerName, Verdict]:
    jobs.events.clear()
    await jobs.round_jobs.judge(Judge(Round(0), tuple(updates), (), Cause.ALL, ""))
    [event] = jobs.events
    assert isinstance(event, Judged)
    return {verdict.peer: verdict for verdict in event.verdicts}


async def held(jobs: Jobs, serving: Serve) -> tuple[Content, Update, Update]:
    """Two stored updates: one of the serving peer and one of another."""
    content = Content()
    serving["fetch"] = wholly(content)
    update = jobs.announce(content, 100)
    await jobs.run()
    return content, update, jobs.room.receive(C, 100)


def test_an_update_damaged_on_our_disk_is_fetched_again(tmp_path: Path) -> None:
    async def scene(jobs: Jobs, serving: Serve) -> None:
        _, update, other = await held(jobs, serving)
        flip(jobs.room.state.updates.path(update.digest), CHUNK_BYTES + 77)
        verdicts = await judged(jobs, [update, other])
        assert all(verdict.accepted for verdict in verdicts.values())
        assert jobs.worker_jobs.shown == [[B, C]]
        assert jobs.room.state.updates.verify(update.digest)
        jobs.observer.damaged.assert_called_once()

    with_jobs(tmp_path, scene)


@pytest.mark.parametrize("slow", [False, True])
def test_an_update_that_cannot_be_fetched_again_is_missing_and_others_are_judged(
    tmp_path: Path, slow: bool
) -> None:
    async def scene(jobs: Jobs, serving: Serve) -> None:
        _, update, other = await held(jobs, serving)
        flip(jobs.room.state.updates.path(update.digest), CHUNK_BYTES + 77)

        async def stuck(request: Any, context: Any) -> None:
            if slow:  # a peer that makes us wait for ever must not make the others wait
                await asyncio.Event().wait()

        serving["fetch"] = stuck
        jobs.bench.barrier.parameters = replace(jobs.bench.barrier.parameters, grace_s=0.2)
        verdicts = await judged(jobs, [update, other])
        assert (verdicts[B].accepted, verdicts[B].reason) == (False, Reason.DAMAGED)
        assert verdicts[B].fate == "missing"
        assert verdicts[C].accepted
        jobs.observer.peers.transfer_failed.assert_not_called()

    with_jobs(tmp_path, scene)


@pytest.mark.parametrize("gone", [False, True])
def test_a_decision_is_executed_without_files_lost_since(tmp_path: Path, gone: bool) -> None:
    async def scene(jobs: Jobs, serving: Serve) -> None:
        _, update, other = await held(jobs, serving)
        path = jobs.room.state.updates.path(update.digest)
        if gone:
            path.unlink()
        else:
            flip(path, CHUNK_BYTES + 77)
        serving["fetch"] = sending()
        verdicts = tuple(
            Verdict(peer, True, Reason.OK, weight=0.3, digest=one.digest)
            for peer, one in ((B, update), (C, other))
        )
        jobs.events.clear()
        await jobs.round_jobs.merge(Decision(Round(0), Cause.ALL, "", (update, other), verdicts))
        assert jobs.events == [Merged(Round(0), Digest("m" * 64))]
        assert jobs.worker_jobs.shown == [[C]]
        assert jobs.round_jobs.results.left_out == (B,)

    with_jobs(tmp_path, scene)


def test_a_stored_file_of_another_size_is_fetched_again(tmp_path: Path) -> None:
    """A peer may announce the digest of any file that it knows."""

    async def scene(jobs: Jobs, serving: Serve) -> None:
        serving["fetch"] = sending()
        digest = jobs.room.file(jobs.room.state.updates, "short")
        update = Update(B, Generation(0), Round(100), digest)
        jobs.manifests[digest] = replace(MANIFEST, update=update)
        await jobs.downloads.fetch(update)
        assert jobs.events == [FetchFailed(update, Reason.CHECKSUM, retriable=False)]

    with_jobs(tmp_path, scene)
