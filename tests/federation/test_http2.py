"""Attacks below gRPC: HTTP/2, TLS and TCP, with and without a member's certificate.

All tests share a federation: the attacker has the keys of site-b, site-c is a real node, and site-d
checks after each attack that site-a still answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import time
from collections.abc import Callable, Iterator

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import pytest
from hyperframe.frame import ContinuationFrame, HeadersFrame

from lightyear_node.identity.keys import Identity
from lightyear_node.lab.federation import Federation, SiteHome
from lightyear_node.transport import limits, messages
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.client import PeerClient
from lightyear_node.types import Announcement, Digest, Round
from tests.support.attacked_node import AttackedNode
from tests.support.site_queries import DEADLINE_S, A, LayOut

STREAMS = 100
"""Far more than one connection may have open."""
RESETS, PINGS = 1000, 1000
SILENT_S = 20.0
"""For a server that does not answer: longer than the handshake timeout."""


class Raw:
    """One raw HTTP/2 connection to the node."""

    def __init__(
        self, attacked: AttackedNode, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    ) -> None:
        keys = attacked.attacker.directory / "keys"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.minimum_version = context.maximum_version = version
        context.set_alpn_protocols(["h2"])
        context.load_cert_chain(keys / "tls.crt", keys / "tls.key")
        self._line = context.wrap_socket(connected(attacked.node))
        config = h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        self.http = h2.connection.H2Connection(config)
        self.ended: list[str] = []
        """How each stream, or ping, ended: gRPC's status, `reset` or `pong`."""
        self.closed = False

    def __enter__(self) -> Raw:
        self.http.initiate_connection()
        self.send()
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()

    def open(self, method: str, *more: tuple[str, str], end: bool = False) -> int:
        stream = self.http.get_next_available_stream_id()
        headers = [(":method", "POST"), (":scheme", "https"), (":authority", "site-a")]
        headers += [(":path", f"/lightyear_node.v1.Exchange/{method}")]
        headers += [("content-type", "application/grpc"), ("te", "trailers"), *more]
        self.http.send_headers(stream, headers, end_stream=end)
        return stream

    def call(self, method: str, request: bytes) -> int:
        stream = self.open(method)
        self.http.send_data(
            stream, b"\0" + len(request).to_bytes(4, "big") + request, end_stream=True
        )
        self.send()
        return stream

    def send(self, frames: bytes = b"") -> None:
        """Send the pending frames, then these bytes; the node may have closed the connection."""
        try:
            self._line.sendall(self.http.data_to_send() + frames)
        except OSError:
            self.closed = True

    def hear(self, until: Callable[[Raw], object], seconds: float = SILENT_S) -> None:
        """Receive until this holds or the node has closed the connection."""
        deadline = time.monotonic() + seconds
        while not self.closed and not until(self):
            self._line.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                received = self._line.recv(1 << 16)
                for event in self.http.receive_data(received) if received else ():
                    self._note(event)
                self.send()
                self.closed = self.closed or not received
            except TimeoutError:
                pytest.fail("the node neither answers nor hangs up")
            except (OSError, h2.exceptions.ProtocolError):
                self.closed = True

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            self.closed = True
        elif isinstance(event, h2.events.PingAckReceived):
            self.ended.append("pong")
        elif isinstance(event, h2.events.StreamReset):
            self.ended.append("reset")
        elif isinstance(event, (h2.events.TrailersReceived, h2.events.ResponseReceived)):
            status = dict(event.headers or ()).get("grpc-status")
            self.ended += [status] if status is not None else []


def connected(node: SiteHome) -> socket.socket:
    host, _, port = node.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SILENT_S)


@pytest.fixture(scope="module")
def attacked(lay_out_once: LayOut) -> Iterator[AttackedNode]:
    homes = lay_out_once(4, rounds=100_000)
    with Federation([homes[0], homes[2]]) as federation:
        federation.wait_until(lambda s: s[A] is not None and s[A]["round"] >= 1, DEADLINE_S)
        yield AttackedNode(federation, homes[0], homes[1])


@pytest.fixture(autouse=True)
def _check_answers(attacked: AttackedNode) -> Iterator[None]:
    """Check after every test that an honest peer gets answers and rounds complete."""
    yield
    node = Identity.load(attacked.node.directory / "keys").certificate
    caller = Identity.load(attacked.node.directory.parent / "site-d" / "keys")

    async def heartbeat() -> Announcement:
        client = PeerClient(A, DirectChannel(A, attacked.node.address, [node], caller))
        try:
            return await client.announce(Announcement(1, Round(0), "training", None))
        finally:
            await client.close()

    assert asyncio.run(heartbeat()).round >= 1
    attacked.check_progress()


def test_metadata_beyond_its_limit_is_refused(attacked: AttackedNode) -> None:
    with Raw(attacked) as raw:
        raw.open("Announce", *((f"x-{n}", "x" * 1000) for n in range(100)), end=True)
        raw.send()
        raw.hear(lambda raw: raw.ended)
        assert raw.closed or raw.ended[0] != "0"


def test_headers_that_never_end_are_cut_off(attacked: AttackedNode) -> None:
    with Raw(attacked) as raw:
        head = HeadersFrame(1, b"", flags=[])
        more = ContinuationFrame(1, b"\x40\x01x\x7f\x80\x7f" + b"x" * 16_000, flags=[])
        raw.send(head.serialize())
        for _ in range(1000):
            raw.send(more.serialize())
            if raw.closed:
                break
        raw.hear(lambda raw: raw.ended)
        assert raw.closed or raw.ended


def test_a_thousand_streams_opened_and_reset_at_once_are_survived(attacked: AttackedNode) -> None:
    with Raw(attacked) as raw:
        for _ in range(RESETS):
            raw.http.reset_stream(raw.open("Announce"), h2.errors.ErrorCodes.CANCEL)
        raw.send()
        raw.http.ping(b"12345678")
        raw.send()
        raw.hear(lambda raw: "pong" in raw.ended)
        assert "0" not in raw.ended


def test_a_flood_of_pings_ends_the_connection(attacked: AttackedNode) -> None:
    with Raw(attacked) as raw:
        for _ in range(PINGS):
            raw.http.ping(b"12345678")
        raw.send()
        raw.hear(lambda raw: False)
        assert raw.closed


def test_a_flood_of_settings_is_survived(attacked: AttackedNode) -> None:
    with Raw(attacked) as raw:
        for size in range(PINGS):
            raw.http.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1000 + size})
            raw.send()
        raw.call("Announce", b"")
        raw.hear(lambda raw: raw.ended)


def test_the_stream_limit_holds_over_several_connections(attacked: AttackedNode) -> None:
    # Too many at once; or refused at once, after the attacks of earlier tests.
    reasons = ("too_many_calls", "cooling_down")

    def denied() -> float:
        return sum(attacked.count("peer_calls_denied", reason=reason) for reason in reasons)

    before = denied()
    with contextlib.ExitStack() as opened:
        lines = [opened.enter_context(Raw(attacked)) for _ in range(5)]
        for raw in lines:
            # Nothing is read before, so that flow control does not limit the client.
            for _ in range(STREAMS):
                raw.open("Announce")
            raw.send()
        for raw in lines:
            raw.hear(lambda raw: len(raw.ended) >= STREAMS // 2)
            assert "0" not in raw.ended
    attacked.wait_until(lambda: denied() > before)


def test_readers_that_never_read_lose_their_connections(attacked: AttackedNode) -> None:
    """Answers that flow control blocks stay in memory while their connection is open."""
    updates = attacked.node.state_dir / "updates"
    found = [path.name for path in updates.iterdir() if re.fullmatch(r"[0-9a-f]{64}", path.name)]
    with contextlib.ExitStack() as opened:
        lines = []
        for _ in range(2 * limits.CONNECTIONS_PER_PEER_MAX):
            raw = opened.enter_context(Raw(attacked))
            raw.http.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 0})
            raw.call("Fetch", messages.fetch_to(Digest(found[0]), 0, False).SerializeToString())
            lines.append(raw)
            # One after the other, so that it is known which is the oldest.
            raw.hear(lambda raw: raw.http.remote_settings.max_concurrent_streams == 16)
        for raw in lines[: limits.CONNECTIONS_PER_PEER_MAX]:
            raw.hear(lambda raw: False)
            assert raw.closed


def test_five_hundred_silent_sockets_are_closed(attacked: AttackedNode) -> None:
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(connected(attacked.node)) for _ in range(500)]
        attacked.check_progress()
        for line in silent:
            line.settimeout(SILENT_S)
            with contextlib.suppress(ConnectionResetError):
                assert line.recv(1) == b"", "data sent to an unauthenticated client"


def test_plaintext_gets_no_answer(attacked: AttackedNode) -> None:
    http = h2.connection.H2Connection()
    http.initiate_connection()
    with connected(attacked.node) as line:
        line.sendall(http.data_to_send())
        received = b""
        with contextlib.suppress(ConnectionResetError):
            received = line.recv(1 << 16)
        # At most a TLS alert, not HTTP/2.
        assert received == b"" or received[0] == 0x15


def test_old_tls_is_refused(attacked: AttackedNode) -> None:
    before = attacked.count("authentication_failures", reason="old_tls")
    with Raw(attacked, ssl.TLSVersion.TLSv1_2) as raw:
        raw.call("Announce", b"")
        raw.hear(lambda raw: raw.ended)
        assert raw.ended == ["7"], "permission denied"
    attacked.wait_until(
        lambda: attacked.count("authentication_failures", reason="old_tls") == before + 1
    )
