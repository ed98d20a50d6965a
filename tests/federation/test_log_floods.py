"""A member and unauthenticated clients that try to fill a node's disk with log lines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from grpc import StatusCode

from lightyear_node.lab.federation import Federation, SiteHome
from lightyear_node.observe.log_limits import CHARS_MAX, LINES_MAX
from lightyear_node.transport import messages
from lightyear_node.types import Reason
from tests.byzantine.member import Member
from tests.support.site_queries import DEADLINE_S, A, B, LayOut, metrics_of, phase_of

SUPPRESSED = "lightyear_log_lines_suppressed_total"
REASONS = itertools.cycle([Reason.BLOCKED, Reason.FEDERATION, Reason.VERSION])
PREFIX_CHARS = len("03:31:35 WARNING ")
"""Time and level before the message."""


class VaryingMember(Member):
    """Refuses every call with a new reason and text, and sends a different hello each time.

    It behaves correctly between two refusals, so that each of them is a change.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.words = itertools.count()
        self.refuses = False

    async def answer_announce(self, request: bytes, context: Any) -> bytes:
        count = next(self.words)
        if self.refuses and count % 2:
            details = f"{next(REASONS)}: complaint {count} {'x' * 1000}"
            await context.abort(StatusCode.FAILED_PRECONDITION, details)
        return await super().answer_announce(request, context)

    async def send_another_hello(self) -> None:
        """Send a hello with a new boot id and another federation or two hundred settings."""
        assert self.node_greeting is not None
        count = next(self.words)
        digest = next(iter(self.node_greeting.clauses.values()))
        clauses = {f"{count}.{'k' * 100}.{n}": digest for n in range(200)}
        hello = replace(
            self.node_greeting, boot_id=f"boot-{count}", lamport=self.stamp, clauses=clauses
        )
        hello = replace(hello, agreement="f" * 64, yours=None, your_head=None)
        if count % 2:
            hello = replace(hello, federation=f"federation-{count}")
        await self.call("Hello", messages.hello_to(hello).SerializeToString())


@pytest.fixture
def node(lay_out_sites: LayOut) -> Iterator[tuple[Federation, SiteHome, SiteHome]]:
    """A running site whose only peer is played by the test."""
    one, other = lay_out_sites(2, rounds=100_000)
    with Federation([one]) as federation:
        yield federation, one, other


def test_a_member_that_varies_its_messages_does_not_flood_the_log(
    node: tuple[Federation, SiteHome, SiteHome],
) -> None:
    _, home, attacker = node

    async def vary_messages() -> None:
        async with VaryingMember(attacker.directory, home.directory) as member:
            await asyncio.wait_for(member.meet(), DEADLINE_S)
            member.refuses = True
            async with asyncio.timeout(DEADLINE_S):
                while metrics_of(home)[SUPPRESSED] < 2 * LINES_MAX:
                    await member.send_another_hello()

    asyncio.run(vary_messages())
    lines = [line for line in home.log.read_text().splitlines() if B in line]
    kinds = Counter(re.sub(r"\d", "", line[PREFIX_CHARS:])[:40] for line in lines)
    assert max(kinds.values()) <= 3 * LINES_MAX, "three reasons share a prefix"
    assert max(map(len, lines)) <= PREFIX_CHARS + CHARS_MAX + 1
    assert any("it belongs to the federation" in line for line in lines)
    assert any("its peers.yaml differs from ours" in line for line in lines)


def test_refused_unauthenticated_clients_leave_no_log_line(
    node: tuple[Federation, SiteHome, SiteHome],
) -> None:
    """Neither from the node nor from gRPC, whether they send TLS, other bytes or nothing."""
    federation, home, _ = node
    federation.wait_until(lambda s: phase_of(s, A) == "observing", DEADLINE_S)
    before = home.log.read_text()
    host, port = home.address.split(":")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    for count in range(60):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as line:
            if count % 3 == 0:
                tls.wrap_socket(line).recv(1)
            elif count % 3 == 1:
                line.sendall(b"GET / HTTP/1.1\r\n\r\n")
                line.recv(1)
    turned_away = 'lightyear_authentication_failures_total{reason="handshake"}'
    federation.wait_until(lambda _: metrics_of(home)[turned_away] >= 40, DEADLINE_S)
    assert home.log.read_text() == before
