"""Translates gRPC's status codes to `PeerError`, with messages for operators.

gRPC reports most connection failures as one code with a text for its own developers; that text
selects the message here, and is used for nothing else.
"""

from __future__ import annotations

from grpc import StatusCode

from lightyear_node.errors import PeerError, PeerMisbehaved, PeerRefusedUs, PeerUnreachable
from lightyear_node.transport import limits
from lightyear_node.types import PeerName, Reason

_HANDSHAKE = (
    "TLS handshake failed: is our certificate in their peers.yaml, and theirs the one in ours?"
)
_WRONG_CERTIFICATE = "the site at {address} shows another certificate than the one in peers.yaml"

_CONNECTING: tuple[tuple[str, Reason, str], ...] = (
    (
        "certificate has expired",
        Reason.IDENTITY,
        "the certificate of the site at {address} has expired, or our clock is wrong",
    ),
    (
        "certificate is not yet valid",
        Reason.IDENTITY,
        "the certificate of the site at {address} is not yet valid: our clock is wrong",
    ),
    ("CERTIFICATE_VERIFY_FAILED", Reason.IDENTITY, _WRONG_CERTIFICATE),
    ("not in peer certificate", Reason.IDENTITY, _WRONG_CERTIFICATE),
    ("Hostname Verification", Reason.IDENTITY, _WRONG_CERTIFICATE),
    (
        "Connection refused",
        Reason.UNREACHABLE,
        "nothing listens at {address}: is the node running there?",
    ),
    ("has not called us", Reason.UNREACHABLE, "it has no address, and has not called us lately"),
    ("resol", Reason.UNREACHABLE, "the name in {address} cannot be resolved"),
    # We have closed it, because no data came.
    (
        "Endpoint closing",
        Reason.UNREACHABLE,
        "{address} accepts our connections but sends nothing: is the machine there paused or busy?",
    ),
    ("andshake", Reason.UNREACHABLE, _HANDSHAKE),
    # A server that refuses our certificate closes the connection without an error.
    ("Socket closed", Reason.UNREACHABLE, _HANDSHAKE),
    ("Connection reset", Reason.UNREACHABLE, _HANDSHAKE),
)


_REASONS = {reason.value: reason for reason in Reason}


def to_peer_error(peer: PeerName, address: str, code: StatusCode, details: str) -> PeerError:
    """The error for a failed call to `peer`; `details` are the peer's own text, or gRPC's."""
    text = printable_line(details)
    match code:
        case StatusCode.UNAVAILABLE:
            reason, sentence = _connection(details)
            return PeerUnreachable(peer, reason, sentence.format(address=address))
        case StatusCode.DEADLINE_EXCEEDED:
            return PeerUnreachable(peer, Reason.TIMEOUT, f"no answer from {address} in time")
        case StatusCode.NOT_FOUND:
            return PeerUnreachable(peer, Reason.STALE_ROUND, "no longer offers this update")
        case StatusCode.RESOURCE_EXHAUSTED if "larger than max" in text:
            return PeerMisbehaved(peer, Reason.TOO_LARGE, f"sent too large a message ({text})")
        case StatusCode.RESOURCE_EXHAUSTED:
            return PeerUnreachable(peer, Reason.UNREACHABLE, f"is busy ({text})")
        case StatusCode.PERMISSION_DENIED:
            return PeerRefusedUs(
                peer, Reason.IDENTITY, f"our certificate is not in their peers.yaml ({text})"
            )
        case StatusCode.FAILED_PRECONDITION:
            name, _, sentence = text.partition(": ")
            known = _REASONS.get(name)
            if known is None:
                return PeerRefusedUs(peer, Reason.BLOCKED, f"refuses us: {text}")
            return PeerRefusedUs(peer, known, f"refuses us: {sentence}")
        case StatusCode.INVALID_ARGUMENT | StatusCode.UNIMPLEMENTED:
            return PeerRefusedUs(
                peer, Reason.MALFORMED, f"does not understand us: another version? ({text})"
            )
        case _:
            return PeerUnreachable(peer, Reason.UNREACHABLE, f"{code.name.lower()}: {text}")


def _connection(details: str) -> tuple[Reason, str]:
    # Only while connecting; later the same texts mean that an established connection broke.
    if "connect" in details or "resol" in details or "has not called" in details:
        for pattern, reason, sentence in _CONNECTING:
            if pattern in details:
                return reason, sentence
    return Reason.UNREACHABLE, "the connection to {address} broke"


def printable_line(text: str) -> str:
    """A peer's text as one printable line of limited length, safe for logs and terminals."""
    line = "".join(char if char.isprintable() else "?" for char in text)
    return line[: limits.DETAIL_CHARS_MAX]
