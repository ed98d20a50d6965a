"""Which weights files are kept: delta bases, offered updates, and nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.errors import PeerError
from lightyear_node.node.retention import Retention
from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.storage.blobs import BlobStore, hash_file
from lightyear_node.storage.journal_memory import TrainingResult
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.storage.state_directory import StateDirectory
from lightyear_node.types import Digest, Generation, Manifest, PeerName, Reason, Round, Update
from tests.support.tls_sites import GRID, A

US, B, C = (PeerName(f"site-{letter}") for letter in "abc")
NOTHING: frozenset[Digest] = frozenset()


class Room:
    """A site's files, each with different content."""

    def __init__(self, folder: Path, *, delta: bool = True) -> None:
        self.state = StateDirectory(folder)
        self.round_journal = RoundJournal(self.state.journal, wall_ns=lambda: 0)
        self.round_journal.models = [self.file(self.state.models, "model")]
        self.retention = Retention(self.state, self.round_journal, GRID, delta=delta)

    def file(self, store: BlobStore, content: str) -> Digest:
        path = store.scratch_path()
        path.write_text(content)
        return store.adopt(path).digest

    def seal(self, round: int) -> Digest:
        digest = self.file(self.state.updates, f"ours {round}")
        carry = self.file(self.state.carry, f"carry {round}")
        update = Update(US, Generation(0), Round(round), digest)
        manifest = Manifest(
            "ward", update, 1, Digest("5" * 64), GRID.raw_bytes, 1, self.retention.base()
        )
        work = TrainingResult(digest, digest, carry, GRID.raw_bytes, 1, {})
        memory = DurableState(Generation(0), Round(round))
        self.round_journal.seal(update, memory, work, A.sign_manifest(manifest))
        return digest

    def receive(self, peer: PeerName, round: int) -> Update:
        # Not adopted: only our own files are.
        path = self.state.updates.scratch_path()
        path.write_text(f"{peer} {round}")
        digest = hash_file(path)[0]
        path.rename(self.state.updates.path(digest))
        update = Update(peer, Generation(0), Round(round), digest)
        self.retention.received(update, NOTHING)
        return update

    def has(self, *digests: Digest) -> list[bool]:
        return [self.state.updates.has(digest) for digest in digests]


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


def test_each_update_is_offered_with_the_one_before_as_base(room: Room) -> None:
    first, second = room.seal(0), room.seal(1)
    offer = asyncio.run(room.retention.offer(B, second))
    assert offer is not None
    assert offer.base is not None
    assert offer.base.path == room.state.updates.path(first)
    older = asyncio.run(room.retention.offer(B, first))
    assert older is not None
    assert older.base is None, "what came before that is gone"
    assert asyncio.run(room.retention.offer(B, Digest("0" * 64))) is None


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"blocked": frozenset({B})}, Reason.BLOCKED),
        ({"quarantined": {B: (Generation(0), Round(0))}}, Reason.QUARANTINED),
    ],
)
def test_blocked_and_quarantined_peers_get_no_update(
    room: Room, changed: dict[str, Any], reason: Reason
) -> None:
    digest = room.seal(0)
    memory = replace(room.round_journal.memory, **changed)
    room.round_journal.note("block", {"peer": B}, memory)
    with pytest.raises(PeerError) as caught:
        asyncio.run(room.retention.offer(B, digest))
    assert caught.value.reason is reason
    assert asyncio.run(room.retention.offer(C, digest)) is not None


def test_peers_updates_are_not_offered(room: Room) -> None:
    room.seal(0)
    assert asyncio.run(room.retention.offer(B, room.receive(B, 0).digest)) is None


def test_each_peers_newest_update_is_kept(room: Room) -> None:
    room.seal(0)
    old, other, new = room.receive(B, 0), room.receive(C, 0), room.receive(B, 1)
    assert room.has(old.digest, other.digest, new.digest) == [False, True, True]
    room.retention.tidy(NOTHING, [B, C])
    assert room.has(other.digest, new.digest) == [True, True]
    room.retention.tidy(NOTHING, [B])
    assert room.has(other.digest, new.digest) == [False, True], "that of a removed peer goes"


def test_updates_that_the_barrier_needs_are_kept(room: Room) -> None:
    room.seal(0)
    old = room.receive(B, 0)
    digest = room.file(room.state.updates, "newer")
    update = Update(B, Generation(0), Round(1), digest)
    room.retention.received(update, frozenset({old.digest}))
    assert room.has(old.digest) == [True]


def test_a_training_result_survives_incoming_updates(room: Room) -> None:
    """Between training and sealing, the journal does not name the new file yet."""
    room.seal(0)
    room.receive(B, 0)
    trained = room.file(room.state.updates, "not yet sealed")
    room.receive(B, 1)
    assert room.has(trained) == [True]


def test_without_deltas_no_base_is_kept(tmp_path: Path) -> None:
    room = Room(tmp_path, delta=False)
    first, second = room.seal(0), room.seal(1)
    assert room.round_journal.manifest is not None
    assert room.round_journal.manifest.manifest.base is None
    received = room.receive(B, 0)
    room.retention.tidy(NOTHING, [B])
    assert room.has(first, second, received.digest) == [True, True, False]
