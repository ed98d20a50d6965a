"""Bytes that are no message, wherever one was due: the peer's fault, and nothing of ours breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from lightyear_node.errors import PeerMisbehaved
from lightyear_node.records import PeerName, Reason
from lightyear_node.store import Store
from lightyear_node.transport.lending import keep_lending
from lightyear_node.transport.lines import Direct
from lightyear_node.transport.service import Service

from .sites import GRID, HELLO, MANIFEST, QUIET, A, B, FakeHost, calling


@asynccontextmanager
async def babbling() -> AsyncIterator[str]:
    """A member whose every answer, and every question, is bytes that are no message."""

    async def babble(request: Any, context: Any) -> None:
        await context.write(b"\xff" * 64)
        await context.read()

    handler = grpc.stream_stream_rpc_method_handler(babble)
    methods = dict.fromkeys(("Hello", "Announce", "Fetch", "Lend"), handler)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("lightyear_node.v1.Exchange", methods),)
    )
    credentials = grpc.ssl_server_credentials(
        [(A.tls_key_pem, A.certificate.pem)], B.certificate.pem, require_client_auth=True
    )
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def test_an_answer_that_is_no_message_is_the_peers_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with babbling() as address, calling(address) as client:
            for call in (
                client.hello(HELLO),
                client.announce(QUIET),
                client.fetch(MANIFEST, Store(tmp_path), GRID),
            ):
                with pytest.raises(PeerMisbehaved) as caught:
                    await call
                assert caught.value.reason is Reason.MALFORMED

    asyncio.run(scenario())
    assert "deserializing" not in caplog.text, "gRPC complains of what we should"


def test_a_question_that_is_no_message_is_refused_and_the_line_is_lent_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        host = FakeHost()
        service = Service(host, tmp_path)
        async with babbling() as address:
            line = Direct(PeerName("site-a"), address, [A.certificate], B)
            async with asyncio.TaskGroup() as group:
                lending = group.create_task(keep_lending(PeerName("site-a"), lambda: line, service))
                await host.until(lambda: len(host.denials) == 2)
                lending.cancel()
            await line.close()
        service.close()
        assert host.denials == [("malformed", "site-a")] * 2
        assert host.heard == []

    asyncio.run(scenario())
    assert "deserializing" not in caplog.text, "gRPC complains of what we should"
