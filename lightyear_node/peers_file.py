"""Writes `peers.yaml`: the file that all sites share, kept pleasant to read."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lightyear_node import identity
from lightyear_node.config.agreement import PINS_MAX, Agreement, Peer, load_agreement
from lightyear_node.errors import ConfigError
from lightyear_node.joining import Joined

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
    """Add sites to the file, or begin it.

    A site that is already there keeps the certificate it had, as the first of two pins: so it can
    change from one to the other while everybody goes on.
    """
    if path.exists():
        agreement = load_agreement(path)
        if federation is not None and federation != agreement.federation:
            raise ConfigError(
                f"{path} belongs to the federation `{agreement.federation}`",
                hint="leave --federation out, or name another file with --peers",
            )
        peers = {peer.name: peer for peer in agreement.peers}
        values = agreement.model_dump(exclude_unset=True)
    else:
        peers = {}
        values = {"version": 1, "federation": federation or "federation"}
    if rounds is not None:
        values["rounds"] = rounds
    for site in joined:
        new = peer_of(site)
        peers[site.name] = _with_pin(path, peers.get(site.name), new)
    return _rewrite(path, values, sorted(peers.values(), key=lambda peer: peer.name))


def remove_peer(path: Path, name: str, fingerprint: str | None = None) -> Agreement:
    """Remove a site, or one of its two certificates."""
    agreement = load_agreement(path)
    listed = {peer.name: peer for peer in agreement.peers}
    if name not in listed:
        raise ConfigError(
            f"{path}: there is no site `{name}` in it", hint=f"it has {', '.join(listed)}"
        )
    if fingerprint is None:
        del listed[name]
    else:
        listed[name] = _without_pin(path, listed[name], fingerprint)
    return _rewrite(path, agreement.model_dump(exclude_unset=True), listed.values())


def _with_pin(path: Path, listed: Peer | None, new: Peer) -> Peer:
    if listed is None:
        return new
    if new.fingerprint[0] in listed.fingerprint:
        return listed.model_copy(update={"address": new.address})
    if len(listed.fingerprint) == PINS_MAX:
        raise ConfigError(
            f"{path}: {new.name} has two certificates already",
            hint="remove the one that is not used any more first: `lightyear-node peers remove"
            f" {new.name} --fingerprint {listed.fingerprint[0]}`",
        )
    return Peer(
        name=new.name,
        address=new.address,
        fingerprint=(*listed.fingerprint, *new.fingerprint),
        certificate=(*listed.certificate, *new.certificate),
    )


def _without_pin(path: Path, listed: Peer, fingerprint: str) -> Peer:
    if fingerprint not in listed.fingerprint:
        raise ConfigError(
            f"{path}: {listed.name} has no certificate {fingerprint}",
            hint=f"it has {' and '.join(listed.fingerprint)}",
        )
    if len(listed.fingerprint) == 1:
        raise ConfigError(
            f"{path}: {fingerprint} is the only certificate of {listed.name}",
            hint=f"remove the whole site with `lightyear-node peers remove {listed.name}`",
        )
    # The two lists need not be in the same order: people may write this file, too.
    pins = [pin for pin in listed.fingerprint if pin != fingerprint]
    texts = [text for text in listed.certificate if _fingerprint_of(text) != fingerprint]
    return listed.model_copy(update={"fingerprint": tuple(pins), "certificate": tuple(texts)})


def _fingerprint_of(text: str) -> str | None:
    """Of a certificate as it stands in the file; None if that is damaged."""
    try:
        return identity.fingerprint(base64.b64decode("".join(text.split()), validate=True))
    except binascii.Error:
        return None


def _rewrite(path: Path, values: dict[str, Any], peers: Iterable[Peer]) -> Agreement:
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
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be written: {problem.strerror}") from None


def _readable(peer: dict[str, Any]) -> dict[str, Any]:
    """One pin is written as a word, two as a list."""
    return {
        key: value[0] if isinstance(value, list) and len(value) == 1 else value
        for key, value in peer.items()
    }
