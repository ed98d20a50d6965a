"""The line that introduces a site: one shell word with all that another site needs to pin it."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass

from lightyear_node.config.fields import ADDRESS_PATTERN
from lightyear_node.errors import ConfigError
from lightyear_node.identity import CERTIFICATE_BYTES_MAX, Certificate, Identity
from lightyear_node.records import PeerName

_VERSION = "ly1"
_NO_ADDRESS = "-"


@dataclass(frozen=True, slots=True)
class Joined:
    """What a join line says."""

    name: PeerName
    address: str | None
    """None for a site that cannot be reached, and opens its connections itself."""
    certificate: Certificate


def join_line(identity: Identity, address: str | None) -> str:
    if address is not None:
        check_address(address)
    certificate = base64.urlsafe_b64encode(identity.certificate.der).decode().rstrip("=")
    return f"{_VERSION}/{identity.name}/{address or _NO_ADDRESS}/{certificate}"


def parse_join_line(text: str) -> Joined:
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
    return Joined(certificate.name, None if address == _NO_ADDRESS else address, certificate)


def check_address(address: str) -> None:
    match = re.fullmatch(ADDRESS_PATTERN, address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ConfigError(
            f"{address!r} is not an address",
            hint="write host:port, for example fl.site-a.example.org:7443",
        )
