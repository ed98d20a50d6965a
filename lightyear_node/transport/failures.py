"""gRPC's failures as sentences that a person can act on.

Owns the table from status to `PeerError`.  gRPC reports most failures of a connection as one code
with a text for its own developers; here the text chooses the sentence and nothing else.
"""

from __future__ import annotations

from grpc import StatusCode

from lightyear_node.errors import PeerError, PeerMisbehaved, PeerRefusedUs, PeerUnreachable
from lightyear_node.records import PeerName, Reason
from lightyear_node.transport import limits

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
    # It was us who ended it, because nothing came.
    (
        "Endpoint closing",
        Reason.UNREACHABLE,
        "{address} takes our connections and says nothing: is the machine there paused or busy?",
    ),
    ("andshake", Reason.UNREACHABLE, _HANDSHAKE),
    # A server that refuses our certificate hangs up without a word.
    ("Socket closed", Reason.UNREACHABLE, _HANDSHAKE),
    ("Connection reset", Reason.UNREACHABLE, _HANDSHAKE),
)


_REASONS = {reason.value: reason for reason in Reason}


def explain(peer: PeerName, address: str, code: StatusCode, details: str) -> PeerError:
    said = _quoted(details)
    match code:
        case StatusCode.UNAVAILABLE:
            reason, sentence = _connection(details)
            return PeerUnreachable(peer, reason, sentence.format(address=address))
        case StatusCode.DEADLINE_EXCEEDED:
            return PeerUnreachable(peer, Reason.TIMEOUT, f"no answer from {address} in time")
        case StatusCode.NOT_FOUND:
            return PeerUnreachable(peer, Reason.STALE_ROUND, "no longer offers this update")
        case StatusCode.RESOURCE_EXHAUSTED if "larger than max" in said:
            return PeerMisbehaved(peer, Reason.TOO_LARGE, f"sent too large a message ({said})")
        case StatusCode.RESOURCE_EXHAUSTED:
            return PeerUnreachable(peer, Reason.UNREACHABLE, f"is busy ({said})")
        case StatusCode.PERMISSION_DENIED:
            return PeerRefusedUs(
                peer, Reason.IDENTITY, f"our certificate is not in their peers.yaml ({said})"
            )
        case StatusCode.FAILED_PRECONDITION:
            word, _, sentence = said.partition(": ")
            known = _REASONS.get(word)
            if known is None:
                return PeerRefusedUs(peer, Reason.BLOCKED, f"refuses us: {said}")
            return PeerRefusedUs(peer, known, f"refuses us: {sentence}")
        case StatusCode.INVALID_ARGUMENT | StatusCode.UNIMPLEMENTED:
            return PeerRefusedUs(
                peer, Reason.MALFORMED, f"does not understand us: another version? ({said})"
            )
        case _:
            return PeerUnreachable(peer, Reason.UNREACHABLE, f"{code.name.lower()}: {said}")


def _connection(details: str) -> tuple[Reason, str]:
    # Only while connecting; afterwards the same words mean that an established line broke.
    if "connect" in details or "resol" in details or "has not called" in details:
        for words, reason, sentence in _CONNECTING:
            if words in details:
                return reason, sentence
    return Reason.UNREACHABLE, "the connection to {address} broke"


def _quoted(said: str) -> str:
    """A peer's words, fit for a log: one printable line."""
    line = "".join(char if char.isprintable() else "?" for char in said)
    return line[: limits.DETAIL_CHARS_MAX]
