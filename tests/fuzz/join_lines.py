"""Join lines: what somebody sent by mail, up to a certificate that would be pinned.

The first byte of an input says how the rest is read: as the line, or as changes to the certificate
in a sound one (place, new byte), whose checksum random text would never have.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import UTC, datetime

from lightyear_node.errors import ConfigError
from lightyear_node.identity import make_identity
from lightyear_node.joining import join_line, parse_join_line

SITE = make_identity("site-b", datetime(2026, 1, 1, tzinfo=UTC))
ADDRESS = "fl.site-b.example.org:7443"
LINE = join_line(SITE, ADDRESS)


def seeds() -> Iterator[bytes]:
    for line in (LINE, join_line(SITE, "[::1]:7443"), LINE[:-8], "ly1/a/b:1/MIIB", "ly2/"):
        yield b"\0" + line.encode()
    yield b"\1\0\x10\0\x41"


def check(sent: bytes) -> None:
    if not sent:
        return
    if sent[0] & 1:
        line = f"ly1/{SITE.name}/{ADDRESS}/{_encoded(_changed(SITE.certificate.der, sent[1:]))}"
    else:
        # As a command line brings it: bytes that are no text become lone surrogates.
        line = sent[1:].decode(errors="surrogateescape")
    try:
        joined = parse_join_line(line)
    except ConfigError:
        return
    again = f"ly1/{joined.name}/{joined.address}/{_encoded(joined.certificate.der)}"
    assert parse_join_line(again) == joined
    if sent[0] & 1:
        assert joined.certificate == SITE.certificate, "an altered certificate was taken"


def _changed(der: bytes, changes: bytes) -> bytes:
    changed = bytearray(der)
    for step in range(0, len(changes) - 2, 3):
        place = int.from_bytes(changes[step : step + 2], "big") % len(changed)
        changed[place] = changes[step + 2]
    return bytes(changed)


def _encoded(der: bytes) -> str:
    return base64.urlsafe_b64encode(der).decode().rstrip("=")
