"""A node's home directory: its settings, its keys, its state, and the checks before it may start.

    node.yaml    the site's own settings
    peers.yaml   the federation's agreement
    keys/        private keys, 0600
    state/       LOCK, journal.db, updates/, models/, carry/

Everything an operator can have got wrong is found here, before anything runs.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import fcntl
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from lightyear_node.barrier import (
    Terms,
    admissible_min_peers,
    default_faulty_max,
    default_min_peers,
)
from lightyear_node.config.agreement import LIGHTYEAR, Agreement, Peer, RuleTerms, load_agreement
from lightyear_node.config.site import NODE_FILE, Site, load_site
from lightyear_node.errors import AlreadyRunning, ConfigError, DiskFull, StoreError
from lightyear_node.identity import Certificate, Identity, fingerprint
from lightyear_node.journal import Journal
from lightyear_node.records import Digest, PeerName
from lightyear_node.store import Store


@dataclass(frozen=True, slots=True)
class Home:
    """Settings that have passed every check that needs no network and no model."""

    directory: Path
    site: Site
    agreement: Agreement
    identity: Identity
    certificates: Mapping[PeerName, tuple[Certificate, ...]]
    """The pinned certificates of everybody, ourselves included."""
    peers_file: Path

    @property
    def us(self) -> PeerName:
        return self.identity.name

    @property
    def others(self) -> tuple[PeerName, ...]:
        """Whom this site exchanges models with; nobody under the rule `local`."""
        if self.rule.alone:
            return ()
        return tuple(sorted(name for name in self.certificates if name != self.us))

    @property
    def pins(self) -> Mapping[PeerName, tuple[Certificate, ...]]:
        """Who may call us, by which certificates."""
        return {peer: self.certificates[peer] for peer in self.others}

    @property
    def rule(self) -> RuleTerms:
        return self.site.rule_of(self.agreement)

    def terms(self) -> Terms:
        """The barrier's part of the agreement, with defaults that the number of sites allows."""
        barrier = self.agreement.barrier
        if self.rule.alone:
            return Terms(frozenset(), 0, 0, self.agreement.rounds, observe_s=0.0)
        sites = len(self.agreement.peers)
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
        return Terms(
            peers=frozenset(self.others),
            min_peers=min_peers,
            faulty_max=faulty_max,
            rounds=self.agreement.rounds,
            grace_s=barrier.grace,
            grace_min_s=barrier.grace_min or barrier.grace / 3,
            deadline_s=barrier.deadline,
            heartbeat_s=barrier.heartbeat,
            suspect_s=barrier.suspect,
            observe_s=barrier.observe,
            echo=barrier.consistency == "echo" if barrier.consistency else faulty_max > 0,
        )

    def opening(self) -> dict[str, Any]:
        """All that a new worker must know; nothing in it is secret."""
        site, agreement = self.site, self.agreement
        return {
            "entry": site.task.entry,
            "args": site.task.args,
            "name": self.us,
            "sites": sorted(self.certificates),
            "seed": agreement.seed,
            "rule": self.rule.model_dump(),
            "rounds": agreement.rounds,
            "device": site.device,
            "threads": site.worker.threads,
            "exchange": agreement.exchange.model_dump(),
            "malfunction": site.malfunction.model_dump() if site.malfunction else None,
        }

    @property
    def watched(self) -> tuple[Path, ...]:
        """The files whose changes a running node follows."""
        keys = self.directory / self.site.keys_dir
        return self.peers_file, keys / "tls.crt", keys / "tls.key"

    @property
    def listen(self) -> str | None:
        """None for a site that cannot be reached, and so need not listen."""
        return self.site.listen or self.site.address or self.address_of(self.us)

    def address_of(self, peer: PeerName) -> str | None:
        return next(one.address for one in self.agreement.peers if one.name == peer)


def load_home(
    directory: Path,
    peers_file: Path,
    *,
    environment: Mapping[str, str],
    flags: Mapping[str, Any],
    now: datetime,
) -> Home:
    site = load_site(directory / NODE_FILE, environment, flags)
    agreement = load_agreement(peers_file)
    _check_overrides(directory / NODE_FILE, site, agreement)
    identity = Identity.load(directory / site.keys_dir)
    if identity.certificate.expires <= now:
        raise ConfigError(
            f"our certificate ended on {identity.certificate.expires:%Y-%m-%d}",
            hint="run `lightyear-node renew`, have every site add the line it prints, and then"
            " run `lightyear-node renew --activate`",
        )
    ours = agreement.find(identity.fingerprint)
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
        PeerName(peer.name): pinned_certificates(peers_file, peer) for peer in agreement.peers
    }
    return Home(directory, site, agreement, identity, certificates, peers_file)


def _check_overrides(path: Path, site: Site, agreement: Agreement) -> None:
    stray = next(iter(site.rule.model_dump(exclude_none=True)), None)
    if stray is not None and agreement.rule.name != LIGHTYEAR:
        raise ConfigError(
            f"{path}: `rule.{stray}` is a setting of lightyear,"
            f" but the federation's rule is {agreement.rule.name}",
            hint="take it out, of the file or of the environment",
        )


def pinned_certificates(peers_file: Path, peer: Peer) -> tuple[Certificate, ...]:
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
    if {fingerprint(certificate.der) for certificate in found} != set(peer.fingerprint):
        raise ConfigError(
            f"{peers_file}: the fingerprint of {peer.name} is not that of its certificate",
            hint=hint,
        )
    return tuple(found)


class State:
    """The state directory of a running node; nobody else may open it at the same time."""

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as problem:
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _unwritable(directory, problem) from None
            raise StoreError(
                f"{directory}: cannot be made: {problem.strerror}",
                hint="check the owner and mode of the folder above",
            ) from None
        self.directory = directory
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(_lock(directory / "LOCK"))
            self.journal = Journal(directory / "journal.db")
            undo.callback(self.journal.close)
            self.updates = Store(directory / "updates")
            self.models = Store(directory / "models", suffix=".safetensors")
            self.carry = Store(directory / "carry")
            for store in (self.updates, self.models, self.carry):
                store.clear_scratch()
            undo.pop_all()

    def check(self, store: Store, *digests: Digest) -> None:
        for digest in digests:
            if not store.verify(digest):
                raise StoreError(
                    f"{store.path(digest)} is missing or damaged",
                    hint="restore it from a backup, or move the state directory away to start anew",
                )

    def retain(self, *, updates: Set[Digest], models: Set[Digest], carry: Set[Digest]) -> None:
        """Delete all other files."""
        self.updates.retain(updates)
        self.models.retain(models)
        self.carry.retain(carry)

    def close(self) -> None:
        self.journal.close()
        self._lock.close()


def _lock(path: Path) -> TextIO:
    try:
        file = path.open("a+")
    except OSError as problem:
        raise _unwritable(path, problem) from None
    try:
        # The kernel drops the lock with the process, however that ends.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read(32).strip()
        file.close()
        raise AlreadyRunning(
            f"another node (process {owner or 'unknown'}) is running on {path.parent}",
            hint="stop it first, or give this one its own home directory",
        ) from None
    try:
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
    except OSError as problem:
        with contextlib.suppress(OSError):  # what could not be written cannot be flushed either
            file.close()
        raise _unwritable(path, problem) from None
    return file


def _unwritable(path: Path, problem: OSError) -> StoreError:
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"{path}: {problem.strerror}")
    return StoreError(
        f"{path}: cannot be written: {problem.strerror}",
        hint="the node needs to write its state directory: check owner, mode and disk",
    )
