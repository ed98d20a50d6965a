"""What a member can ask wrong, or too often: the behaviours that call the node."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc.aio
from behaviours import FLOOD, MESSAGE_BYTES_MAX, SMALL_MESSAGE_BYTES_MAX, behaviour, said
from member import Member

from lightyear_node.transport import limits, messages

UNREAD_S = 2.0
"""How long answers are left unread."""


@behaviour
async def large_announcement(member: Member) -> None:
    await member.call("Announce", said(member, phase="x" * (SMALL_MESSAGE_BYTES_MAX + 1)))


@behaviour
async def oversized_announcement(member: Member) -> None:
    await member.call("Announce", said(member, phase="x" * (MESSAGE_BYTES_MAX + 1)))


@behaviour
async def malformed_announcement(member: Member) -> None:
    await member.call("Announce", b"\xff" * 64)


@behaviour
async def malformed_greeting(member: Member) -> None:
    await member.call("Hello", b"\x1a\x03\x1b[2")


@behaviour
async def drip_request(member: Member) -> None:
    """Open a call, and never send what we want."""
    call = member.stream("Announce")
    await call.code()


@behaviour
async def announce_flood(member: Member) -> None:
    for _ in range(3 * limits.CALLS_BURST):  # one after the other: not too many, only too often
        await member.call("Announce", member.announcement())


@behaviour
async def fetch_flood(member: Member) -> None:
    """Ask for the node's update again and again, and read nothing of it."""
    assert member.heard is not None
    assert member.heard.latest is not None
    digest = member.heard.latest.manifest.update.digest
    request = messages.fetch_to(digest, 0, False).SerializeToString()
    calls = [member.stream("Fetch") for _ in range(FLOOD)]

    async def ask(call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(request)  # unless it has been denied already
        await call.code()

    # Those that are answered do not end, because nothing of them is read.
    asking = [asyncio.get_running_loop().create_task(ask(call)) for call in calls]
    await asyncio.wait(asking, timeout=UNREAD_S)
    for call, asked in zip(calls, asking, strict=True):
        call.cancel()
        asked.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


@behaviour
async def lend_flood(member: Member) -> None:
    calls = [member.stream("Lend") for _ in range(FLOOD)]
    await asyncio.gather(*(call.code() for call in calls[FLOOD // 2 :]))
    for call in calls:
        call.cancel()


@behaviour
async def nothing_but_rubbish(member: Member) -> None:
    """So much of it that the node stops listening; with time in between, or it would anyway."""
    for _ in range(20):
        await member.call("Hello", b"\xff" * 8)
        await asyncio.sleep(0.4)
