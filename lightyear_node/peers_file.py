"""Writes `peers.yaml`: the file that all sites share, kept pleasant to read."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lightyear_node.config import Agreement, Peer, load_agreement
from lightyear_node.errors import ConfigError
from lightyear_node.identity import Joined

_HEAD = """\
# The federation's agreement: the same file at every site.
# Every site compares its digest with the others' when they meet.
"""


def peer_of(joined: Joined) -> Peer:
    certificate = joined.certificate
    return Peer(
        name=joined.name,
        address=joined.address,
        fingerprint=(certificate.fingerprint,),
        certificate=(base64.b64encode(certificate.der).decode(),),
    )


def add_peers(
    path: Path, joined: Sequence[Joined], federation: str | None, rounds: int | None = None
) -> Agreement:
    """Add sites to the file, or begin it; a site that is already there is replaced by name."""
    new = {site.name: peer_of(site) for site in joined}
    if path.exists():
        agreement = load_agreement(path)
        if federation is not None and federation != agreement.federation:
            raise ConfigError(
                f"{path} belongs to the federation `{agreement.federation}`",
                hint="leave --federation out, or name another file with --peers",
            )
        kept = [peer for peer in agreement.peers if peer.name not in new]
        values = agreement.model_dump(exclude_unset=True)
    else:
        kept = []
        values = {"version": 1, "federation": federation or "federation"}
    if rounds is not None:
        values["rounds"] = rounds
    peers = sorted([*kept, *new.values()], key=lambda peer: peer.name)
    # Validated again: two names could share an address.
    try:
        agreement = Agreement(**{**values, "peers": [peer.model_dump() for peer in peers]})
    except ValidationError as problem:
        raise ConfigError(f"{path}: {problem.errors()[0]['msg']}") from None
    write_agreement(path, agreement)
    return agreement


def write_agreement(path: Path, agreement: Agreement) -> None:
    """Written whole or not at all, so that a running node never reads half a file."""
    plain = agreement.model_dump(mode="json", exclude_unset=True)
    plain["peers"] = [_readable(peer) for peer in plain["peers"]]
    text = _HEAD + yaml.safe_dump(plain, sort_keys=False, width=10_000)
    temporary = path.with_name(path.name + ".new")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be written: {problem.strerror}") from None


def _readable(peer: dict[str, Any]) -> dict[str, Any]:
    """One pin is written as a word, two as a list."""
    return {
        key: value[0] if isinstance(value, list) and len(value) == 1 else value
        for key, value in peer.items()
    }
