"""A node's home directory: configuration, keys and state, checked before the node starts.

    node.yaml    the site's own settings
    peers.yaml   the federation config, the same file at all sites
    keys/        private keys, 0600
    state/       LOCK, journal.db, journal-000001.db …, updates/, models/, carry/

Errors of the configuration are found here, before anything runs.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lightyear_node.config.federation import (
    LIGHTYEAR,
    FederationConfig,
    PeerConfig,
    RuleConfig,
    load_federation_config,
)
from lightyear_node.config.node import NODE_FILE, NodeConfig, load_node_config
from lightyear_node.errors import ConfigError
from lightyear_node.identity.keys import Certificate, Identity
from lightyear_node.protocol.parameters import (
    Parameters,
    admissible_min_peers,
    default_faulty_max,
    default_min_peers,
)
from lightyear_node.types import PeerName

BUNDLE_ENTRY = "lightyear_node.integrations.monai_bundle:build"
"""Builds the task of a MONAI bundle; imported by the worker only, as any task is."""


@dataclass(frozen=True, slots=True)
class Home:
    """A configuration that has passed every check that needs no network and no model."""

    directory: Path
    config: NodeConfig
    federation: FederationConfig
    identity: Identity
    certificates: Mapping[PeerName, tuple[Certificate, ...]]
    """The pinned certificates of all sites, this one included."""
    peers_file: Path

    @property
    def us(self) -> PeerName:
        return self.identity.name

    @property
    def others(self) -> tuple[PeerName, ...]:
        """The peers that this site exchanges models with; none under the rule `local`."""
        if self.rule.alone:
            return ()
        return tuple(sorted(name for name in self.certificates if name != self.us))

    @property
    def pins(self) -> Mapping[PeerName, tuple[Certificate, ...]]:
        """The certificates of the peers that may call this site."""
        return {peer: self.certificates[peer] for peer in self.others}

    @property
    def rule(self) -> RuleConfig:
        return self.config.rule_of(self.federation)

    def parameters(self) -> Parameters:
        """The barrier's parameters, with defaults that depend on the number of sites."""
        barrier = self.federation.barrier
        if self.rule.alone:
            return Parameters(frozenset(), 0, 0, self.federation.rounds, observe_s=0.0)
        sites = len(self.federation.peers)
        faulty_max = barrier.faulty_max
        if faulty_max is None:
            faulty_max = default_faulty_max(sites)
        admissible = admissible_min_peers(sites, faulty_max)
        if not admissible:
            raise ConfigError(
                f"{sites} site{'s' * (sites != 1)} cannot run a federation that tolerates"
                f" {faulty_max} faulty: it takes at least {max(2, 3 * faulty_max + 1)}"
                " (two sites, and 3 × faulty_max + 1)",
                hint="add sites to peers.yaml, or lower `barrier.faulty_max`",
            )
        min_peers = barrier.min_peers or default_min_peers(sites, faulty_max)
        if min_peers not in admissible:
            raise ConfigError(
                f"barrier.min_peers is {min_peers}, but with {sites} sites of which {faulty_max}"
                f" may be faulty it must be at least max(1, 2 × {faulty_max}) = {admissible[0]}"
                f" and at most {sites} - 1 - {faulty_max} = {admissible[-1]}",
                hint="correct `barrier.min_peers` or `barrier.faulty_max` in peers.yaml",
            )
        return Parameters(
            peers=frozenset(self.others),
            min_peers=min_peers,
            faulty_max=faulty_max,
            rounds=self.federation.rounds,
            grace_s=barrier.grace,
            grace_min_s=barrier.grace_min or barrier.grace / 3,
            deadline_s=barrier.deadline,
            heartbeat_s=barrier.heartbeat,
            suspect_s=barrier.suspect,
            observe_s=barrier.observe,
            echo=barrier.consistency == "echo" if barrier.consistency else faulty_max > 0,
        )

    def opening(self) -> dict[str, Any]:
        """The first job of every new worker process; contains no secrets."""
        config, federation = self.config, self.federation
        task = config.task.model_dump()
        if config.task.script is not None:
            task["script"] = str((self.directory / config.task.script).absolute())
        if config.task.bundle is not None:
            root = str((self.directory / config.task.bundle).absolute())
            task = {
                "entry": BUNDLE_ENTRY,
                "args": {"bundle": root, "overrides": config.task.args},
            }
        return {
            **task,
            "name": self.us,
            "sites": sorted(self.certificates),
            "seed": federation.seed,
            "rule": self.rule.model_dump(),
            "rounds": federation.rounds,
            "device": config.device,
            "threads": config.worker.threads,
            "exchange": federation.exchange.model_dump(),
        }

    @property
    def watched(self) -> tuple[Path, ...]:
        """The files that a running node reloads when they change."""
        keys = self.directory / self.config.keys_dir
        return self.peers_file, keys / "tls.crt", keys / "tls.key"

    @property
    def listen(self) -> str | None:
        """The address to listen on; None for a site that cannot be reached."""
        return self.config.listen or self.config.address or self.address_of(self.us)

    def address_of(self, peer: PeerName) -> str | None:
        return next(one.address for one in self.federation.peers if one.name == peer)


def load_home(
    directory: Path,
    peers_file: Path,
    *,
    environment: Mapping[str, str],
    flags: Mapping[str, Any],
    now: datetime,
) -> Home:
    config = load_node_config(directory / NODE_FILE, environment, flags)
    federation = load_federation_config(peers_file)
    _check_overrides(directory / NODE_FILE, config, federation)
    identity = Identity.load(directory / config.keys_dir)
    if identity.certificate.expires <= now:
        raise ConfigError(
            f"our certificate ended on {identity.certificate.expires:%Y-%m-%d}",
            hint="run `lightyear-node renew`, have every site add the line it prints, and then"
            " run `lightyear-node renew --activate`",
        )
    ours = federation.find(identity.fingerprint)
    if ours is None:
        raise ConfigError(
            f"{peers_file}: our own certificate {identity.fingerprint} is not in it",
            hint='add this site with `lightyear-node peers add "$(lightyear-node id)"`',
        )
    if ours.name != identity.name:
        raise ConfigError(
            f"{peers_file}: our certificate is listed as `{ours.name}`,"
            f" but it says `{identity.name}`"
        )
    certificates = {
        PeerName(peer.name): pinned_certificates(peers_file, peer) for peer in federation.peers
    }
    return Home(directory, config, federation, identity, certificates, peers_file)


def _check_overrides(path: Path, config: NodeConfig, federation: FederationConfig) -> None:
    stray = next(iter(config.rule.model_dump(exclude_none=True)), None)
    if stray is not None and federation.rule.name != LIGHTYEAR:
        raise ConfigError(
            f"{path}: `rule.{stray}` is a setting of lightyear,"
            f" but the federation's rule is {federation.rule.name}",
            hint="take it out, of the file or of the environment",
        )


def pinned_certificates(peers_file: Path, peer: PeerConfig) -> tuple[Certificate, ...]:
    hint = f"add {peer.name} again with `lightyear-node peers add`"
    found = []
    for text in peer.certificate:
        try:
            der = base64.b64decode("".join(text.split()), validate=True)
            certificate = Certificate.parse(der)
        except (binascii.Error, ConfigError) as problem:
            raise ConfigError(
                f"{peers_file}: the certificate of {peer.name} is damaged: {problem}", hint=hint
            ) from None
        if certificate.name != peer.name:
            raise ConfigError(
                f"{peers_file}: the certificate of {peer.name} is that of {certificate.name}",
                hint=hint,
            )
        found.append(certificate)
    if {certificate.fingerprint for certificate in found} != set(peer.fingerprint):
        raise ConfigError(
            f"{peers_file}: the fingerprint of {peer.name} is not that of its certificate",
            hint=hint,
        )
    return tuple(found)
