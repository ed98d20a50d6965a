"""No string of a peer becomes a path, controls a terminal or forges a log line."""

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
from lightyear_node.observe.log import TextFormatter
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.transport import messages
from lightyear_node.transport.grpc_errors import to_peer_error
from lightyear_node.types import Announcement, Digest, Round
from lightyear_node.v1 import exchange_pb2 as pb
from tests.support.tls_sites import HELLO
from tests.unit.node.test_gossip import B, Side

# All that protobuf accepts: Unicode without lone surrogates.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
PATHS = ("../../etc/passwd", "/etc/shadow", "~root", "..", "\0")
LINES = ("a\nINFO all is well", "\x1b[2J", "\x9b2J", "\u2028", "\u202e", "{0} %s %d", "a" * 300)
NASTY = st.sampled_from((*PATHS, *LINES))
ANY_TEXT = TEXT | NASTY | st.builds(lambda a, b: a + b, NASTY, TEXT)


def logging_side() -> Side:
    """A site with the log format of the daemon."""
    side = Side("site-a")
    side.observer.log.handlers[0].setFormatter(TextFormatter("%(message)s"))
    return side


def check_log_and_status(side: Side) -> None:
    lines = side.log.getvalue().split("\n")[:-1]
    # Every event is exactly one line.
    assert all(line.startswith("site-b ") for line in lines)
    assert all(line.isprintable() for line in lines)
    assert side.observer.peers[B].about.isprintable()


@given(field=st.sampled_from(["federation", "boot_id"]), text=ANY_TEXT)
def test_strings_in_a_greeting(field: str, text: str) -> None:
    side = logging_side()
    greeting = messages.hello_to(HELLO)
    setattr(greeting, field, text)
    with contextlib.suppress(messages.Malformed, PeerError):
        hello = messages.hello_from(pb.Greeting.FromString(greeting.SerializeToString()))
        asyncio.run(side.gossip.hello(B, hello))
    check_log_and_status(side)


@given(field=st.sampled_from(["federation", "peer", "dtype", "phase"]), text=ANY_TEXT)
def test_strings_in_an_announcement(field: str, text: str) -> None:
    side = logging_side()
    other = Side("site-b")
    message = messages.announcement_to(Announcement(1, Round(0), "training", other.seal()))
    setattr(message if field == "phase" else message.latest.manifest, field, text)
    with contextlib.suppress(messages.Malformed, PeerError):
        announced = pb.Announcement.FromString(message.SerializeToString())
        asyncio.run(side.gossip.announce(B, messages.announcement_from(announced)))
    check_log_and_status(side)


@given(code=st.sampled_from(list(grpc.StatusCode)), text=ANY_TEXT)
def test_strings_in_a_refusal(code: grpc.StatusCode, text: str) -> None:
    side = logging_side()

    class Refusing:
        async def hello(self, hello: Any) -> Any:
            raise to_peer_error(B, "b.example.org:1", code, text)

        announce = hello

    asyncio.run(side.gossip.contact(B, Refusing()))
    check_log_and_status(side)
    assert side.log.getvalue().count("\n") == 1


@given(wire=st.binary(max_size=64) | ANY_TEXT.map(str.encode))
def test_a_valid_digest_is_a_file_name_in_the_store(wire: bytes) -> None:
    with contextlib.suppress(messages.Malformed, DecodeError):
        digest, _, _ = messages.fetch_from(pb.FetchRequest(digest=wire))
        with tempfile.TemporaryDirectory() as folder:
            store = BlobStore(Path(folder))
            for path in (store.path(digest), store.part_path(digest)):
                assert path.resolve().parent == Path(folder).resolve()


@given(text=ANY_TEXT)
def test_any_other_string_is_refused_as_a_file_name(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = BlobStore(Path(folder))
        for use in (store.path, store.has, store.part_path, store.verify, store.discard):
            with pytest.raises(ValueError, match="not a digest"):
                use(Digest(text))
