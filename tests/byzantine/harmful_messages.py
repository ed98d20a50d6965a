"""Behaviours with messages that are well-formed and signed, and meant to do harm."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from typing import Any

from lightyear_node.transport import limits, messages
from lightyear_node.types import Announcement, Digest, Evidence, Round, SignedManifest
from tests.byzantine.behaviours import behaviour, fresh
from tests.byzantine.member import Member

JUMP = 2**40
"""The largest jump of a timestamp that earlier versions accepted."""
NEWER = 8
"""Updates that are announced before the evidence about an old round."""


async def announce(member: Member, **changed: Any) -> None:
    """Send one announcement, below the node's rate limit."""
    state = Announcement(member.stamp, Round(0), "training", None, boot_id="byzantine")
    message = messages.announcement_to(replace(state, **changed))
    await member.call("Announce", bytes(message.SerializeToString()))
    await asyncio.sleep(0.2)


async def greet(member: Member, **changed: Any) -> None:
    assert member.node_greeting is not None
    message = messages.hello_to(replace(member.node_greeting, probe=False, yours=None, **changed))
    await member.call("Hello", bytes(message.SerializeToString()))
    await asyncio.sleep(0.2)


def signed_update(member: Member, round: int, digest: Digest) -> SignedManifest:
    manifest = member.manifest(fresh(member))
    update = replace(manifest.update, round=Round(round), digest=digest)
    return member.identity.sign_manifest(replace(manifest, update=update))


@behaviour
async def old_evidence(member: Member) -> None:
    """Proof of our own equivocation in an old round, after many newer updates."""
    assert member.node_state is not None
    old = member.node_state.round
    first, second = (signed_update(member, old, Digest(digit * 64)) for digit in "12")
    for round in range(old + 100, old + 100 + NEWER):
        await announce(member, latest=signed_update(member, round, Digest(f"{round:064x}")))
    await announce(member, evidence=(Evidence(first, second),))


@behaviour
async def small_jumps(member: Member) -> None:
    """Timestamps that grow as much as a single message may increase them."""
    assert member.node_state is not None
    for step in range(1, 6):
        await greet(member, lamport=member.node_state.lamport + step * JUMP)
        await announce(member, lamport=member.node_state.lamport + step * JUMP)


@behaviour
async def stamp_beyond_reach(member: Member) -> None:
    """A timestamp near the maximum."""
    await announce(member, lamport=1 << 61)


@behaviour
async def clause_flood(member: Member) -> None:
    """Greetings that each have another boot id and other unknown settings."""
    for _ in range(20):
        random_hex = os.urandom(8).hex()
        clauses = {f"k{random_hex}{one}": "00" * 8 for one in range(limits.CLAUSES_MAX)}
        await greet(
            member, boot_id=random_hex, agreement=Digest(os.urandom(32).hex()), clauses=clauses
        )


@behaviour
async def ever_later(member: Member) -> None:
    """A new round and generation with every announcement."""
    for round in range(60):
        member.generation += 1
        await announce(member, latest=signed_update(member, round, Digest(f"{round:064x}")))
