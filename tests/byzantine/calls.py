"""Behaviours that call the node: malformed or too frequent calls."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc.aio

from lightyear_node.transport import limits, messages
from tests.byzantine.behaviours import (
    FLOOD,
    MESSAGE_BYTES_MAX,
    SMALL_MESSAGE_BYTES_MAX,
    behaviour,
    raw_announcement,
)
from tests.byzantine.member import Member

UNREAD_S = 2.0
"""For how long answers are left unread."""


@behaviour
async def large_announcement(member: Member) -> None:
    await member.call(
        "Announce", raw_announcement(member, phase="x" * (SMALL_MESSAGE_BYTES_MAX + 1))
    )


@behaviour
async def oversized_announcement(member: Member) -> None:
    await member.call("Announce", raw_announcement(member, phase="x" * (MESSAGE_BYTES_MAX + 1)))


@behaviour
async def malformed_announcement(member: Member) -> None:
    await member.call("Announce", b"\xff" * 64)


@behaviour
async def malformed_greeting(member: Member) -> None:
    await member.call("Hello", b"\x1a\x03\x1b[2")


@behaviour
async def drip_request(member: Member) -> None:
    """Open a call and never send the request."""
    call = member.stream("Announce")
    await call.code()


@behaviour
async def announce_flood(member: Member) -> None:
    for _ in range(3 * limits.CALLS_BURST):  # sequentially: not too many at once, but too often
        await member.call("Announce", member.announcement())


@behaviour
async def fetch_flood(member: Member) -> None:
    """Request the node's update many times, and read nothing of it."""
    assert member.node_state is not None
    assert member.node_state.latest is not None
    digest = member.node_state.latest.manifest.update.digest
    request = messages.fetch_to(digest, 0, False).SerializeToString()
    calls = [member.stream("Fetch") for _ in range(FLOOD)]

    async def request_update(call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(request)  # unless it was denied already
        await call.code()

    # Accepted calls do not end, because nothing is read.
    tasks = [asyncio.get_running_loop().create_task(request_update(call)) for call in calls]
    await asyncio.wait(tasks, timeout=UNREAD_S)
    for call, task in zip(calls, tasks, strict=True):
        call.cancel()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@behaviour
async def reverse_stream_flood(member: Member) -> None:
    calls = [member.stream("Lend") for _ in range(FLOOD)]
    await asyncio.gather(*(call.code() for call in calls[FLOOD // 2 :]))
    for call in calls:
        call.cancel()


@behaviour
async def malformed_flood(member: Member) -> None:
    """Malformed calls until the node refuses all; with pauses, to stay below the rate limit."""
    for _ in range(20):
        await member.call("Hello", b"\xff" * 8)
        await asyncio.sleep(0.4)
