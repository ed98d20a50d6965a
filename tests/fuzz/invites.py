"""Fuzz target: join lines, from the text to the certificate that would be pinned.

The first byte of an input selects how to read the rest: as the line, or as changes to the
certificate in a valid one (position, new byte), since random text never has a valid checksum.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime

from lightyear_node.errors import ConfigError
from lightyear_node.identity.invite import invite_line, parse_invite
from lightyear_node.identity.keys import make_identity

SITE = make_identity("site-b", datetime(2026, 1, 1, tzinfo=UTC))
ADDRESS = "fl.site-b.example.org:7443"
LINE = invite_line(SITE, ADDRESS)


def seeds() -> Iterator[bytes]:
    for line in (LINE, invite_line(SITE, "[::1]:7443"), LINE[:-8], "ly1/a/b:1/MIIB", "ly2/"):
        yield b"\0" + line.encode()
    yield b"\1\0\x10\0\x41"


def check(sent: bytes) -> None:
    if not sent:
        return
    if sent[0] & 1:
        line = f"ly1/{SITE.name}/{ADDRESS}/{_encoded(_changed(SITE.certificate.der, sent[1:]))}"
    else:
        # As in sys.argv: undecodable bytes become lone surrogates.
        line = sent[1:].decode(errors="surrogateescape")
    try:
        invite = parse_invite(line)
    except ConfigError:
        return
    again = f"ly1/{invite.name}/{invite.address}/{_encoded(invite.certificate.der)}"
    assert parse_invite(again) == invite
    if sent[0] & 1:
        assert invite.certificate == SITE.certificate, "an altered certificate was accepted"


def _changed(der: bytes, changes: bytes) -> bytes:
    changed = bytearray(der)
    for step in range(0, len(changes) - 2, 3):
        at = int.from_bytes(changes[step : step + 2], "big") % len(changed)
        changed[at] = changes[step + 2]
    return bytes(changed)


def _encoded(der: bytes) -> str:
    return base64.urlsafe_b64encode(der).decode().rstrip("=")
