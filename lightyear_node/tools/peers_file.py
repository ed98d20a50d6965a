"""Writes `peers.yaml`, the federation config that all sites share, in a readable layout."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from lightyear_node.config.federation import (
    PINS_MAX,
    FederationConfig,
    PeerConfig,
    load_federation_config,
)
from lightyear_node.errors import ConfigError
from lightyear_node.identity import keys
from lightyear_node.identity.invite import Invite
from lightyear_node.storage.atomic_files import write_file

_HEADER = """\
# The federation config: the same file at every site.
# Sites compare its digest when they connect.
"""


def peer_of(invite: Invite) -> PeerConfig:
    certificate = invite.certificate
    return PeerConfig(
        name=invite.name,
        address=invite.address,
        fingerprint=(certificate.fingerprint,),
        certificate=(base64.b64encode(certificate.der).decode(),),
    )


def add_peers(
    path: Path, invites: Sequence[Invite], federation: str | None, rounds: int | None = None
) -> FederationConfig:
    """Add sites to the file, or create it.

    A site that is already listed keeps its certificate as the first of two pins, so that it can
    change from one to the other without an interruption.
    """
    if path.exists():
        config = load_federation_config(path)
        if federation is not None and federation != config.federation:
            raise ConfigError(
                f"{path} belongs to the federation `{config.federation}`",
                hint="leave --federation out, or name another file with --peers",
            )
        peers = {peer.name: peer for peer in config.peers}
        values = config.model_dump(exclude_unset=True)
    else:
        peers = {}
        values = {"version": 1, "federation": federation or "federation"}
    if rounds is not None:
        values["rounds"] = rounds
    for invite in invites:
        new = peer_of(invite)
        peers[invite.name] = _with_pin(path, peers.get(invite.name), new)
    return _rewrite(path, values, sorted(peers.values(), key=lambda peer: peer.name))


def remove_peer(path: Path, name: str, fingerprint: str | None = None) -> FederationConfig:
    """Remove a site, or one of its two certificates."""
    config = load_federation_config(path)
    listed = {peer.name: peer for peer in config.peers}
    if name not in listed:
        raise ConfigError(
            f"{path}: there is no site `{name}` in it", hint=f"it has {', '.join(listed)}"
        )
    if fingerprint is None:
        del listed[name]
    else:
        listed[name] = _without_pin(path, listed[name], fingerprint)
    return _rewrite(path, config.model_dump(exclude_unset=True), listed.values())


def _with_pin(path: Path, listed: PeerConfig | None, new: PeerConfig) -> PeerConfig:
    if listed is None:
        return new
    if new.fingerprint[0] in listed.fingerprint:
        return listed.model_copy(update={"address": new.address})
    if len(listed.fingerprint) == PINS_MAX:
        raise ConfigError(
            f"{path}: {new.name} has two certificates already",
            hint="remove the one that is no longer used first: `lightyear-node peers remove"
            f" {new.name} --fingerprint {listed.fingerprint[0]}`",
        )
    return PeerConfig(
        name=new.name,
        address=new.address,
        fingerprint=(*listed.fingerprint, *new.fingerprint),
        certificate=(*listed.certificate, *new.certificate),
    )


def _without_pin(path: Path, listed: PeerConfig, fingerprint: str) -> PeerConfig:
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
    # The two lists may be in different order: people edit this file, too.
    pins = [pin for pin in listed.fingerprint if pin != fingerprint]
    texts = [text for text in listed.certificate if _fingerprint_of(text) != fingerprint]
    return listed.model_copy(update={"fingerprint": tuple(pins), "certificate": tuple(texts)})


def _fingerprint_of(text: str) -> str | None:
    """Fingerprint of a certificate in the file; None if it is damaged."""
    try:
        return keys.fingerprint(base64.b64decode("".join(text.split()), validate=True))
    except binascii.Error:
        return None


def _rewrite(path: Path, values: dict[str, Any], peers: Iterable[PeerConfig]) -> FederationConfig:
    # Validate again: two sites could have the same address.
    try:
        config = FederationConfig(**{**values, "peers": [peer.model_dump() for peer in peers]})
    except ValidationError as problem:
        raise ConfigError(f"{path}: {problem.errors()[0]['msg']}") from None
    write_peers_file(path, config)
    return config


def write_peers_file(path: Path, config: FederationConfig) -> None:
    """Replace the file atomically, so that a running node never reads a part of it."""
    plain = config.model_dump(mode="json", exclude_unset=True)
    plain["peers"] = [_readable(peer) for peer in plain["peers"]]
    text = _HEADER + yaml.safe_dump(plain, sort_keys=False, width=10_000)
    try:
        write_file(path, text, durable=True)
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be written: {problem.strerror}") from None


def _readable(peer: dict[str, Any]) -> dict[str, Any]:
    """A single pin is written as a scalar, two as a list."""
    return {
        key: value[0] if isinstance(value, list) and len(value) == 1 else value
        for key, value in peer.items()
    }
