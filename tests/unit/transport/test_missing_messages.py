"""Unparsable bytes in place of a message are reported as the peer's misbehaviour."""

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
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.handlers import Handlers
from lightyear_node.transport.reverse_calls import serve_reverse_calls
from lightyear_node.types import PeerName, Reason
from tests.support.tls_sites import GRID, HELLO, MANIFEST, QUIET, A, B, FakeHost, calling


@asynccontextmanager
async def sending_garbage() -> AsyncIterator[str]:
    """A server whose every answer, and every reverse call, is unparsable."""

    async def send_garbage(request: Any, context: Any) -> None:
        await context.write(b"\xff" * 64)
        await context.read()

    handler = grpc.stream_stream_rpc_method_handler(send_garbage)
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


def test_an_unparsable_answer_is_reported_as_misbehaviour(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with sending_garbage() as address, calling(address) as client:
            for call in (
                client.hello(HELLO),
                client.announce(QUIET),
                client.fetch(MANIFEST, BlobStore(tmp_path), GRID),
            ):
                with pytest.raises(PeerMisbehaved) as caught:
                    await call
                assert caught.value.reason is Reason.MALFORMED

    asyncio.run(scenario())
    assert "deserializing" not in caplog.text, "gRPC must not parse messages itself"


def test_an_unparsable_reverse_call_is_refused_and_a_new_stream_opened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        host = FakeHost()
        handlers = Handlers(host, tmp_path)
        async with sending_garbage() as address:
            channel = DirectChannel(PeerName("site-a"), address, [A.certificate], B)
            async with asyncio.TaskGroup() as group:
                serving = group.create_task(
                    serve_reverse_calls(PeerName("site-a"), lambda: channel, handlers)
                )
                await host.until(lambda: len(host.denials) == 2)
                serving.cancel()
            await channel.close()
        handlers.close()
        assert host.denials == [("malformed", "site-a")] * 2
        assert host.calls == []

    asyncio.run(scenario())
    assert "deserializing" not in caplog.text, "gRPC must not parse messages itself"
