"""The product's gossip and manifest store for one simulated process.

Real signatures and messages, without the byte layer.  Calls are coroutines in the product; here the
simulated network resumes them with an answer or a timeout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from lightyear_node.errors import PeerError
from lightyear_node.identity.keys import Identity, make_identity, signing_keys
from lightyear_node.node.gossip import Gossip, LocalFacts, LocalState
from lightyear_node.protocol.manifests import ManifestStore
from lightyear_node.transport.codec import ChunkGrid
from lightyear_node.types import (
    Announcement,
    Digest,
    Hello,
    Manifest,
    PeerName,
    SignedManifest,
    Update,
)

FEDERATION = "simulated"
SCHEMA = Digest("5c" * 32)
_HEADER = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
GRID = ChunkGrid(len(_HEADER).to_bytes(8, "little") + _HEADER + b" " * (-len(_HEADER) % 8))
BORN = datetime(2026, 1, 1, tzinfo=UTC)

Message = Hello | Announcement
Answer = Message | PeerError


@cache
def identity_of(name: PeerName) -> Identity:
    return make_identity(name, BORN)


def digest_of(*parts: object) -> Digest:
    return Digest(hashlib.sha256(repr(parts).encode()).hexdigest())


def sign(update: Update, stamp: int = 0) -> SignedManifest:
    """Sign an update with its site's key."""
    manifest = Manifest(FEDERATION, update, stamp, SCHEMA, GRID.raw_bytes, samples=10)
    return identity_of(update.peer).sign_manifest(manifest)


@dataclass(frozen=True)
class Call:
    """A pending call to a peer."""

    message: Message

    def __await__(self) -> Generator[Call, Any, Any]:
        answer = yield self
        return answer


class SimulatedClient:
    """A client whose calls go over the simulated network."""

    async def hello(self, hello: Hello) -> Hello:
        answer = await Call(hello)
        assert isinstance(answer, Hello)
        return answer

    async def announce(self, announcement: Announcement) -> Announcement:
        answer = await Call(announcement)
        assert isinstance(answer, Announcement)
        return answer


class _Ignore:
    """An observer and a peer memory that ignore every call, also on their parts."""

    def __getattr__(self, name: str) -> _Ignore:
        return self

    def __call__(self, *arguments: object, **named: object) -> None:
        return None


class SimulatedGossip:
    """The gossip of one process; its state is lost with the process."""

    def __init__(
        self,
        us: PeerName,
        members: Iterable[PeerName],
        known: Iterable[SignedManifest],
        boot_id: str,
        state: Callable[[], LocalState],
        emit: Callable[..., None],
    ) -> None:
        self._us = us
        self.manifests = ManifestStore(
            signing_keys(self._pins(members)),
            federation=FEDERATION,
            schema=SCHEMA,
            raw_bytes=GRID.raw_bytes,
            dtype="float32",
        )
        self.manifests.keep(known)
        ignore: Any = _Ignore()
        self.gossip = Gossip(
            LocalFacts(us, FEDERATION, Digest("a9" * 32), SCHEMA, Digest("30" * 32), GRID, boot_id),
            self.manifests,
            ignore,
            ignore,
            state=state,
            emit=emit,
            offer=ignore.offer,
            wall_ns=lambda: 0,
        )

    def reconfigure(self, members: Iterable[PeerName]) -> None:
        self.manifests.set_keys(signing_keys(self._pins(members)))

    def contact(self, peer: PeerName) -> Coroutine[Any, Any, None]:
        return self.gossip.contact(peer, SimulatedClient())

    def answer(self, by: PeerName, message: Message) -> Answer:
        """Answer a call; a refusal is an answer, too."""
        if isinstance(message, Hello):
            return _run_handler(self.gossip.hello(by, message))
        return _run_handler(self.gossip.announce(by, message))

    def _pins(self, members: Iterable[PeerName]) -> dict[PeerName, Any]:
        return {name: (identity_of(name).certificate,) for name in {self._us, *members}}


def _run_handler(handler: Coroutine[Any, Any, Message]) -> Answer:
    """Run a handler that does not suspend."""
    try:
        handler.send(None)
    except StopIteration as done:
        answer: Message = done.value
        return answer
    except PeerError as refusal:
        return refusal
    raise AssertionError("the handler suspended")
