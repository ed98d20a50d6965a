"""Value types of the configuration files: names, addresses, durations, sizes."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
ADDRESS_PATTERN = r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})$"
FINGERPRINT_PATTERN = r"^SHA256:[A-Za-z0-9+/]{43}$"

PATTERN_WORDS = {
    NAME_PATTERN: "a name is lower-case letters, digits and dashes, at most 63",
    FINGERPRINT_PATTERN: "a fingerprint is SHA256: and 43 base64 characters,"
    " as `lightyear-node id` prints it",
}

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class FrozenModel(BaseModel):
    """A table of such values; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def parse_duration_s(value: object) -> object:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d)\s*", value)
        if not match:
            raise ValueError(f"`{value}` is not a duration: write 500ms, 30s, 5m or 2h")
        return float(match[1]) * _UNITS_S[match[2]]
    return value


def parse_size_bytes(value: object) -> object:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKMGT]i?)?B\s*", value)
        if not match:
            raise ValueError(f"`{value}` is not a size: write 500MiB, 20GiB or 1TB")
        unit = match[2] or ""
        step = 1024 if unit.endswith("i") else 1000
        return int(float(match[1]) * step ** " KMGT".index(unit[:1].upper() or " "))
    return value


def check_address(value: object) -> str:
    """Check host:port; raises ValueError that says what is wrong."""
    match = re.fullmatch(ADDRESS_PATTERN, value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(
            "expected host:port, for example fl.site-a.example.org:7443, 0.0.0.0:7443"
            ' or "[2001:db8::1]:7443"'
        )
    host, port = match[1], match[2]
    if int(port) > 65535:
        raise ValueError("a port is at most 65535")
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise ValueError(f"{host[1:-1]} is not an IPv6 address") from None
    return match[0]


Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Address = Annotated[str, BeforeValidator(check_address)]
Seconds = Annotated[float, BeforeValidator(parse_duration_s), Field(gt=0, le=30 * 86400)]
Bytes = Annotated[int, BeforeValidator(parse_size_bytes), Field(ge=0, le=2**60)]
