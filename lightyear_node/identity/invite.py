"""The join line: one shell word with the name, address and certificate of a site.

Another site needs nothing else to pin it.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from lightyear_node.config import fields
from lightyear_node.errors import ConfigError
from lightyear_node.identity.keys import CERTIFICATE_BYTES_MAX, Certificate, Identity
from lightyear_node.types import PeerName

_VERSION = "ly1"
_NO_ADDRESS = "-"


@dataclass(frozen=True, slots=True)
class Invite:
    """The content of an join line."""

    name: PeerName
    address: str | None
    """None for a site that cannot be reached: it opens all its connections itself."""
    certificate: Certificate


def invite_line(identity: Identity, address: str | None) -> str:
    if address is not None:
        check_address(address)
    certificate = base64.urlsafe_b64encode(identity.certificate.der).decode().rstrip("=")
    return f"{_VERSION}/{identity.name}/{address or _NO_ADDRESS}/{certificate}"


def parse_invite(text: str) -> Invite:
    hint = "copy the whole line that `lightyear-node id` prints at the other site"
    parts = text.strip().split("/")
    if parts[0] != _VERSION:
        raise ConfigError(f"a join line begins with {_VERSION}/", hint=hint)
    if len(parts) != 4:
        raise ConfigError(
            f"a join line has 4 parts between slashes, this one has {len(parts)}", hint=hint
        )
    _, name, address, encoded = parts
    if address != _NO_ADDRESS:
        check_address(address)
    if not re.fullmatch(r"[A-Za-z0-9_-]*", encoded) or len(encoded) > 2 * CERTIFICATE_BYTES_MAX:
        raise ConfigError("the join line's certificate is not base64url", hint=hint)
    try:
        der = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
        certificate = Certificate.parse(der)
    except (ConfigError, binascii.Error) as error:
        raise ConfigError(f"the join line is cut short or altered ({error})", hint=hint) from None
    if certificate.name != name:
        raise ConfigError(
            f"the join line says {name!r}, its certificate {certificate.name!r}", hint=hint
        )
    return Invite(certificate.name, None if address == _NO_ADDRESS else address, certificate)


def check_address(address: str) -> None:
    """Raise `ConfigError` unless it is host:port with a port that peers can connect to."""
    try:
        fields.check_address(address)
        if int(address.rpartition(":")[2]) == 0:
            raise ValueError("a port is at least 1")
    except ValueError as problem:
        raise ConfigError(
            f"{address!r} is not an address: {problem}",
            hint="write host:port, for example fl.site-a.example.org:7443",
        ) from None
