"""Why two sites do not get together: every link between them, up to the first that is broken.

The greeting comes first, as a question that leaves no trace at the peer.  When it is answered, the
way to it holds, and both sides' words are compared here.  Only when it is not, the way is gone
again step by step: a connection that never becomes a call would be counted over there as a
stranger's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from lightyear_node.errors import PeerError, PeerRefusedUs, PeerUnreachable
from lightyear_node.identity import Identity
from lightyear_node.records import Check, Digest, Hello, Mark, PeerName, Reason
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.lines import Direct
from lightyear_node.transport.look import (
    ACCEPTED,
    DNS,
    PIN,
    TCP,
    TLS,
    Broken,
    Door,
    follow,
    resolve,
)

ANSWER, VERSION, FEDERATION = "answer", "version", "federation"
AGREEMENT, SCHEMA, INITIAL_MODEL, CLOCK = "agreement", "schema", "initial_model", "clock"
LINKS = (
    *(DNS, TCP, TLS, PIN, ACCEPTED, ANSWER),
    *(VERSION, FEDERATION, AGREEMENT, SCHEMA, INITIAL_MODEL, CLOCK),
)
"""In the order in which they depend on each other."""

CLOCK_TOLERANCE_S = 60.0
EXPIRY_WARNING = timedelta(days=30)
UNKNOWN_DIGEST = Digest("0" * 64)
"""What is sent in place of a digest that is not known here."""


@dataclass(frozen=True, slots=True)
class Question:
    """What we say of ourselves, and what the answers are compared with."""

    hello: Hello
    identity: Identity
    wall_ns: Callable[[], int]
    now: datetime
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Every link to one peer, in order; none for a peer that cannot be asked."""

    peer: PeerName
    address: str | None
    links: tuple[Check, ...]
    about: str = ""

    @property
    def broken(self) -> bool:
        return any(link.mark is Mark.BROKEN for link in self.links)


def cannot_be_asked(peer: PeerName) -> Diagnosis:
    about = f"{peer} has no address in peers.yaml: it dials us, and cannot be asked from here"
    return Diagnosis(peer, None, (), about)


async def diagnose(door: Door, question: Question) -> Diagnosis:
    found: list[Check] = []
    try:
        endpoints = await resolve(door, question.timeout_s)
        where = ", ".join(dict.fromkeys(str(endpoint[0]) for _, endpoint in endpoints))
        found.append(Check(DNS, Mark.HOLDS, where))
        theirs, offset_s = await _greet(door, question)
    except Broken as broken:
        found.append(broken.check)
    except PeerUnreachable as problem:
        way = follow(door, endpoints, question.now, question.timeout_s)
        found += [check async for check in way]
        if found[-1].mark is Mark.HOLDS:
            found.append(_unanswered(door, problem))
    except PeerError as problem:
        found += [Check(link, Mark.HOLDS) for link in (TCP, TLS, PIN)]
        if isinstance(problem, PeerRefusedUs) and problem.reason is Reason.IDENTITY:
            advice = f"send {door.peer} the line of `lightyear-node id`, to add it and restart"
            found.append(Check(ACCEPTED, Mark.BROKEN, _words(problem), advice))
        else:
            found += [Check(ACCEPTED, Mark.HOLDS), _unanswered(door, problem)]
    else:
        found += [Check(TCP, Mark.HOLDS), Check(TLS, Mark.HOLDS), _pin(door, question.now)]
        found += [Check(ACCEPTED, Mark.HOLDS), Check(ANSWER, Mark.HOLDS)]
        found += compare(door.peer, question.hello, theirs, offset_s)
    missing = [Check(name, Mark.NOT_REACHED) for name in LINKS[len(found) :]]
    return Diagnosis(door.peer, door.address, (*found, *missing))


async def _greet(door: Door, question: Question) -> tuple[Hello, float]:
    """Their greeting, and by how many seconds their clock is ahead of ours."""
    line = Direct(door.peer, door.address, door.pinned, question.identity)
    client = PeerClient(door.peer, line)
    try:
        asked_ns = question.wall_ns()
        async with asyncio.timeout(question.timeout_s):
            theirs = await client.hello(question.hello)
        # Their clock was read somewhere between; half of the time is the best guess.
        middle_ns = (asked_ns + question.wall_ns()) // 2
        return theirs, (theirs.wall_time_ns - middle_ns) / 1e9
    except TimeoutError:
        about = f"no answer to our greeting within {question.timeout_s:g} s"
        raise PeerUnreachable(door.peer, Reason.TIMEOUT, about) from None
    finally:
        await client.close()


def _unanswered(door: Door, problem: PeerError) -> Check:
    advice = (
        "run the same version of lightyear-node at both sites"
        if problem.reason is Reason.MALFORMED
        else f"try again; if it stays so, look into the log of the node of {door.peer}"
    )
    return Check(ANSWER, Mark.BROKEN, _words(problem), advice)


def _words(problem: PeerError) -> str:
    return str(problem).removeprefix(f"{problem.peer}: ")


def _pin(door: Door, now: datetime) -> Check:
    """gRPC has compared it; when it will end is known from peers.yaml."""
    ends = max(certificate.expires for certificate in door.pinned)
    if ends - now < EXPIRY_WARNING:
        return Check(
            PIN,
            Mark.DIFFERS,
            f"the certificate of {door.peer} ends in {max(0, (ends - now).days)} days",
            f"remind {door.peer} to renew it and to send its new join line",
        )
    return Check(PIN, Mark.HOLDS)


def compare(peer: PeerName, ours: Hello, theirs: Hello, offset_s: float) -> list[Check]:
    """Both greetings, up to the first difference with which the sites cannot work together."""
    checks = [
        _version(ours, theirs),
        _federation(ours, theirs),
        _agreement(ours, theirs),
        _schema(ours, theirs),
        _initial_model(ours, theirs),
        _clock(peer, offset_s),
    ]
    broken = [index for index, check in enumerate(checks) if check.mark is Mark.BROKEN]
    return checks[: broken[0] + 1] if broken else checks


def _version(ours: Hello, theirs: Hello) -> Check:
    if ours.version_min <= theirs.version_max and theirs.version_min <= ours.version_max:
        return Check(VERSION, Mark.HOLDS, f"protocol {_range(theirs)}")
    return Check(
        VERSION,
        Mark.BROKEN,
        f"it speaks protocol {_range(theirs)}, we speak {_range(ours)}",
        "upgrade lightyear-node at the older site",
    )


def _range(hello: Hello) -> str:
    low, high = hello.version_min, hello.version_max
    return str(low) if low == high else f"{low} to {high}"


def _federation(ours: Hello, theirs: Hello) -> Check:
    if theirs.federation == ours.federation:
        return Check(FEDERATION, Mark.HOLDS, ours.federation)
    return Check(
        FEDERATION,
        Mark.BROKEN,
        f"it belongs to the federation {theirs.federation!r}, we to {ours.federation!r}",
        "give both sites the same peers.yaml",
    )


def _agreement(ours: Hello, theirs: Hello) -> Check:
    if theirs.agreement == ours.agreement:
        return Check(AGREEMENT, Mark.HOLDS, _short(ours.agreement))
    return Check(
        AGREEMENT,
        Mark.DIFFERS,
        f"its peers.yaml is {_short(theirs.agreement)}, ours is {_short(ours.agreement)}",
        "compare the files and give every site the same one; a node reads it when it starts",
    )


def _schema(ours: Hello, theirs: Hello) -> Check:
    if ours.schema == UNKNOWN_DIGEST:
        return Check(SCHEMA, Mark.NOT_KNOWN)
    if theirs.schema == ours.schema:
        return Check(SCHEMA, Mark.HOLDS, _short(ours.schema))
    return Check(
        SCHEMA,
        Mark.BROKEN,
        "its model has other tensors than ours"
        f" (schema {_short(theirs.schema)}, ours is {_short(ours.schema)})",
        "run the same task at both sites, with the same `exchange` in peers.yaml",
    )


def _initial_model(ours: Hello, theirs: Hello) -> Check:
    if ours.initial_model == UNKNOWN_DIGEST:
        return Check(INITIAL_MODEL, Mark.NOT_KNOWN)
    if theirs.initial_model == ours.initial_model:
        return Check(INITIAL_MODEL, Mark.HOLDS, _short(ours.initial_model))
    return Check(
        INITIAL_MODEL,
        Mark.DIFFERS,
        f"it started from other weights, {_short(theirs.initial_model)},"
        f" than we did, {_short(ours.initial_model)}",
        "give the task a function as `model`, and peers.yaml the same `seed` at every site",
    )


def _clock(peer: PeerName, offset_s: float) -> Check:
    if abs(offset_s) <= CLOCK_TOLERANCE_S:
        return Check(CLOCK, Mark.HOLDS, f"{abs(offset_s):.1f} s apart")
    side = "ahead of" if offset_s > 0 else "behind"
    return Check(
        CLOCK,
        Mark.DIFFERS,
        f"their clock is {duration(abs(offset_s))} {side} ours",
        f"set NTP at whichever site is wrong, {peer} or here",
    )


def duration(seconds: float) -> str:
    """The two largest units; what is less than a minute does not count among hours."""
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    minutes = round(seconds / 60)
    hours = minutes // 60
    return f"{hours // 24} d {hours % 24} h" if hours >= 24 else f"{hours} h {minutes % 60} min"


def _short(digest: Digest) -> str:
    return digest[:12]
