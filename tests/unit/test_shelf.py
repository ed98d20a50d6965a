"""Which weights files are kept: the bases of differences, what we offer, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lightyear_node.barrier import Memory
from lightyear_node.home import State
from lightyear_node.ledger import Ledger, Work
from lightyear_node.records import Digest, Generation, Manifest, PeerName, Round, Update
from lightyear_node.shelf import Shelf
from lightyear_node.store import Store, hash_file

from .sites import GRID, A

US, B, C = (PeerName(f"site-{letter}") for letter in "abc")
NOTHING: frozenset[Digest] = frozenset()


class Room:
    """A site's files, each with a content of its own."""

    def __init__(self, folder: Path, *, delta: bool = True) -> None:
        self.state = State(folder)
        self.ledger = Ledger(self.state.journal, wall_ns=lambda: 0, stamp=lambda: 1)
        self.ledger.models = [self.file(self.state.models, "model")]
        self.shelf = Shelf(self.state, self.ledger, GRID, delta=delta)

    def file(self, store: Store, content: str) -> Digest:
        path = store.scratch_path()
        path.write_text(content)
        return store.adopt(path).digest

    def seal(self, round: int) -> Digest:
        digest = self.file(self.state.updates, f"ours {round}")
        carry = self.file(self.state.carry, f"carry {round}")
        update = Update(US, Generation(0), Round(round), digest)
        manifest = Manifest(
            "ward", update, 1, Digest("5" * 64), GRID.raw_bytes, 1, self.shelf.base()
        )
        work = Work(digest, digest, carry, GRID.raw_bytes, 1, {})
        memory = Memory(Generation(0), Round(round))
        self.ledger.seal(update, memory, work, A.sign_manifest(manifest))
        return digest

    def receive(self, peer: PeerName, round: int) -> Update:
        # Not adopted, as what is made here would be.
        path = self.state.updates.scratch_path()
        path.write_text(f"{peer} {round}")
        digest = hash_file(path)[0]
        path.rename(self.state.updates.path(digest))
        update = Update(peer, Generation(0), Round(round), digest)
        self.shelf.received(update, NOTHING)
        return update

    def has(self, *digests: Digest) -> list[bool]:
        return [self.state.updates.has(digest) for digest in digests]


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


def test_each_update_is_offered_with_the_one_before_as_base(room: Room) -> None:
    first, second = room.seal(0), room.seal(1)
    offer = asyncio.run(room.shelf.offer(second))
    assert offer is not None
    assert offer.base == room.state.updates.path(first)
    older = asyncio.run(room.shelf.offer(first))
    assert older is not None
    assert older.base is None, "what came before that is gone"
    assert asyncio.run(room.shelf.offer(Digest("0" * 64))) is None


def test_others_updates_are_not_offered(room: Room) -> None:
    room.seal(0)
    assert asyncio.run(room.shelf.offer(room.receive(B, 0).digest)) is None


def test_of_each_peer_the_last_update_stays(room: Room) -> None:
    room.seal(0)
    old, other, new = room.receive(B, 0), room.receive(C, 0), room.receive(B, 1)
    assert room.has(old.digest, other.digest, new.digest) == [False, True, True]
    room.shelf.tidy(NOTHING, [B, C])
    assert room.has(other.digest, new.digest) == [True, True]
    room.shelf.tidy(NOTHING, [B])
    assert room.has(other.digest, new.digest) == [False, True], "that of a removed peer goes"


def test_what_the_barrier_still_needs_stays(room: Room) -> None:
    room.seal(0)
    old = room.receive(B, 0)
    digest = room.file(room.state.updates, "newer")
    update = Update(B, Generation(0), Round(1), digest)
    room.shelf.received(update, frozenset({old.digest}))
    assert room.has(old.digest) == [True]


def test_an_update_in_training_survives_the_arrival_of_others(room: Room) -> None:
    """Between the end of training and its seal, nobody but the node knows of the new file."""
    room.seal(0)
    room.receive(B, 0)
    trained = room.file(room.state.updates, "not yet sealed")
    room.receive(B, 1)
    assert room.has(trained) == [True]


def test_without_differences_nothing_is_kept_for_them(tmp_path: Path) -> None:
    room = Room(tmp_path, delta=False)
    first, second = room.seal(0), room.seal(1)
    assert room.ledger.manifest is not None
    assert room.ledger.manifest.manifest.base is None
    received = room.receive(B, 0)
    room.shelf.tidy(NOTHING, [B])
    assert room.has(first, second, received.digest) == [True, True, False]
