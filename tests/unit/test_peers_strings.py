"""No string of a peer becomes a path, moves a terminal's cursor or forges a line of the log."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from lightyear_node.errors import PeerError
from lightyear_node.observe.log import _Human
from lightyear_node.records import Digest
from lightyear_node.store import Store
from lightyear_node.transport import messages
from lightyear_node.transport.failures import explain
from lightyear_node.v1 import exchange_pb2 as pb

from .sites import HELLO
from .test_conversation import B, Side

# Whatever protobuf lets through: all of Unicode but lone surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
PATHS = ("../../etc/passwd", "/etc/shadow", "~root", "..", "\0")
LINES = ("a\nINFO all is well", "\x1b[2J", "\x9b2J", "\u2028", "\u202e", "{0} %s %d", "a" * 300)
NASTY = st.sampled_from((*PATHS, *LINES))
SAID = TEXT | NASTY | st.builds(lambda a, b: a + b, NASTY, TEXT)


def listening() -> Side:
    """A site whose log is written as the daemon writes it."""
    side = Side("site-a")
    side.observer.log.handlers[0].setFormatter(_Human("%(message)s"))
    return side


def check_what_people_see(side: Side) -> None:
    lines = side.log.getvalue().split("\n")[:-1]
    # One event, one line: none was torn in two.
    assert all(line.startswith("site-b ") for line in lines)
    assert all(line.isprintable() for line in lines)
    assert side.observer.peers[B].about.isprintable()


@given(field=st.sampled_from(["federation", "boot_id"]), said=SAID)
def test_in_a_greeting(field: str, said: str) -> None:
    side = listening()
    greeting = messages.hello_to(HELLO)
    setattr(greeting, field, said)
    with contextlib.suppress(messages.Malformed, PeerError):
        hello = messages.hello_from(pb.Greeting.FromString(greeting.SerializeToString()))
        asyncio.run(side.conversation.hello(B, hello))
    check_what_people_see(side)


@given(field=st.sampled_from(["federation", "peer", "dtype", "phase"]), said=SAID)
def test_in_an_announcement(field: str, said: str) -> None:
    side = listening()
    other = Side("site-b")
    signed = messages._signed_to(other.seal())
    message = pb.Announcement(lamport=1, phase="training", latest=signed)
    setattr(message if field == "phase" else message.latest.manifest, field, said)
    with contextlib.suppress(messages.Malformed, PeerError):
        announced = pb.Announcement.FromString(message.SerializeToString())
        asyncio.run(side.conversation.announce(B, messages.announcement_from(announced)))
    check_what_people_see(side)


@given(code=st.sampled_from(list(grpc.StatusCode)), said=SAID)
def test_in_a_refusal(code: grpc.StatusCode, said: str) -> None:
    side = listening()

    class Refusing:
        async def hello(self, hello: Any) -> Any:
            raise explain(B, "b.example.org:1", code, said)

        announce = hello

    asyncio.run(side.conversation.contact(B, Refusing()))
    check_what_people_see(side)
    assert side.log.getvalue().count("\n") == 1


@given(wire=st.binary(max_size=64) | SAID.map(str.encode))
def test_a_digest_is_a_name_in_its_own_folder_or_nothing(wire: bytes) -> None:
    with contextlib.suppress(messages.Malformed, DecodeError):
        digest, _, _ = messages.fetch_from(pb.FetchRequest(digest=wire))
        with tempfile.TemporaryDirectory() as folder:
            store = Store(Path(folder))
            for path in (store.path(digest), store._part(digest)):
                assert path.resolve().parent == Path(folder).resolve()


@given(said=SAID)
def test_no_other_string_is_ever_a_path(said: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        for use in (store.path, store.has, store._part, store.verify, store.discard):
            with pytest.raises(ValueError, match="not a digest"):
                use(Digest(said))
