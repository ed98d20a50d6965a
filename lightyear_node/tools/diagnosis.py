"""Diagnoses why two sites cannot work together, up to the first step that fails.

First it sends a greeting that changes nothing at the peer.  If it is answered, the connection works
and both greetings are compared.  Only if it is not, the connection is probed step by step, because
the peer counts a connection without a call as a failed authentication.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from lightyear_node.errors import PeerError, PeerRefusedUs, PeerUnreachable
from lightyear_node.identity.keys import Identity
from lightyear_node.tools.connectivity_probe import (
    ACCEPTED,
    DNS,
    PIN,
    TCP,
    TLS,
    ProbeTarget,
    StepFailed,
    probe,
    resolve,
)
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.client import PeerClient
from lightyear_node.types import Check, Digest, Hello, Mark, PeerName, Reason

ANSWER, VERSION, FEDERATION = "answer", "version", "federation"
AGREEMENT, SCHEMA, INITIAL_MODEL, CLOCK = "agreement", "schema", "initial_model", "clock"
LINKS = (
    *(DNS, TCP, TLS, PIN, ACCEPTED, ANSWER),
    *(VERSION, FEDERATION, AGREEMENT, SCHEMA, INITIAL_MODEL, CLOCK),
)
"""All steps, in the order in which they depend on each other."""

CLOCK_TOLERANCE_S = 60.0
EXPIRY_WARNING = timedelta(days=30)
UNKNOWN_DIGEST = Digest("0" * 64)
"""Sent instead of a digest that is not known here."""


@dataclass(frozen=True, slots=True)
class LocalSummary:
    """Our greeting, with which the answers are compared, and how to send it."""

    hello: Hello
    identity: Identity
    wall_ns: Callable[[], int]
    now: datetime
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All steps to one peer, in order; empty for a peer without an address."""

    peer: PeerName
    address: str | None
    links: tuple[Check, ...]
    about: str = ""

    @property
    def broken(self) -> bool:
        return any(link.mark is Mark.BROKEN for link in self.links)


def without_address(peer: PeerName) -> Diagnosis:
    about = f"{peer} has no address in peers.yaml: it dials us, and cannot be checked from here"
    return Diagnosis(peer, None, (), about)


async def diagnose(target: ProbeTarget, ours: LocalSummary) -> Diagnosis:
    """Check all steps to one peer."""
    found: list[Check] = []
    try:
        endpoints = await resolve(target, ours.timeout_s)
        addresses = ", ".join(dict.fromkeys(str(endpoint[0]) for _, endpoint in endpoints))
        found.append(Check(DNS, Mark.HOLDS, addresses))
        theirs, offset_s = await _greet(target, ours)
    except StepFailed as failed:
        found.append(failed.check)
    except PeerUnreachable as problem:
        checks = probe(target, endpoints, ours.now, ours.timeout_s)
        found += [check async for check in checks]
        if found[-1].mark is Mark.HOLDS:
            found.append(_unanswered(target, problem))
    except PeerError as problem:
        found += [Check(link, Mark.HOLDS) for link in (TCP, TLS, PIN)]
        if isinstance(problem, PeerRefusedUs) and problem.reason is Reason.IDENTITY:
            advice = f"send {target.peer} the line of `lightyear-node id`, for its `peers add`"
            found.append(Check(ACCEPTED, Mark.BROKEN, problem.about, advice))
        else:
            found += [Check(ACCEPTED, Mark.HOLDS), _unanswered(target, problem)]
    else:
        found += [Check(TCP, Mark.HOLDS), Check(TLS, Mark.HOLDS), _pin(target, ours.now)]
        found += [Check(ACCEPTED, Mark.HOLDS), Check(ANSWER, Mark.HOLDS)]
        found += compare(target.peer, ours.hello, theirs, offset_s)
    missing = [Check(name, Mark.NOT_REACHED) for name in LINKS[len(found) :]]
    return Diagnosis(target.peer, target.address, (*found, *missing))


async def _greet(target: ProbeTarget, ours: LocalSummary) -> tuple[Hello, float]:
    """The peer's greeting, and how many seconds its clock is ahead of ours."""
    channel = DirectChannel(target.peer, target.address, target.pinned, ours.identity)
    client = PeerClient(target.peer, channel)
    try:
        sent_ns = ours.wall_ns()
        async with asyncio.timeout(ours.timeout_s):
            theirs = await client.hello(ours.hello)
        # The peer has read its clock in between; the middle is the best estimate.
        middle_ns = (sent_ns + ours.wall_ns()) // 2
        return theirs, (theirs.wall_time_ns - middle_ns) / 1e9
    except TimeoutError:
        about = f"no answer to our greeting within {ours.timeout_s:g} s"
        raise PeerUnreachable(target.peer, Reason.TIMEOUT, about) from None
    finally:
        await client.close()


def _unanswered(target: ProbeTarget, problem: PeerError) -> Check:
    advice = (
        "run the same version of lightyear-node at both sites"
        if problem.reason is Reason.MALFORMED
        else f"try again; if it fails again, see the log of the node of {target.peer}"
    )
    return Check(ANSWER, Mark.BROKEN, problem.about, advice)


def _pin(target: ProbeTarget, now: datetime) -> Check:
    """gRPC has verified the pin; peers.yaml tells when the certificate expires."""
    expires = max(certificate.expires for certificate in target.pinned)
    if expires - now < EXPIRY_WARNING:
        return Check(
            PIN,
            Mark.DIFFERS,
            f"the certificate of {target.peer} expires in {max(0, (expires - now).days)} days",
            f"remind {target.peer} to renew it and to send its new join line",
        )
    return Check(PIN, Mark.HOLDS)


def compare(peer: PeerName, ours: Hello, theirs: Hello, offset_s: float) -> list[Check]:
    """Compare both greetings, up to the first difference that makes the sites incompatible."""
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
        "compare the files and give every site the same one; running nodes notice a new file at"
        " once, but `rule`, `seed`, `exchange` and `federation` take effect after a restart",
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
    """In the two largest units, rounded to minutes from one hour on."""
    if seconds < 3600:
        return f"{int(seconds) // 60} min {int(seconds) % 60} s"
    minutes = round(seconds / 60)
    hours = minutes // 60
    return f"{hours // 24} d {hours % 24} h" if hours >= 24 else f"{hours} h {minutes % 60} min"


def _short(digest: Digest) -> str:
    return digest[:12]
