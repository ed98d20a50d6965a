"""Renewal: a new TLS key and certificate for the same name and signing key.

    keys/next/       prepared: peers pin it beside the one in use
    keys/            in use
    keys/previous/   the pair before that

Two files cannot be replaced in one step, so the key is moved first, and `Identity.load` takes the
certificate from `next/` while it is there without a key.  After a crash at any point, a matching
pair is loaded, the old or the new one.
"""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path

from lightyear_node.config.federation import FederationConfig
from lightyear_node.errors import ConfigError
from lightyear_node.identity.keys import NEXT_DIR, Identity, make_identity
from lightyear_node.identity.private_files import write_private
from lightyear_node.storage.atomic_files import rename_durably, staged_directory, sync

PREVIOUS_DIR = "previous"
_KEY, _CERTIFICATE = "tls.key", "tls.crt"


def prepare(keys_dir: Path, now: datetime) -> Identity:
    """Return the prepared identity; make it if there is none."""
    ready = prepared(keys_dir)
    if ready is not None:
        return ready
    current = Identity.load(keys_dir)
    renewed = make_identity(current.name, now, current.signing_key)
    files = {_KEY: renewed.tls_key_pem, _CERTIFICATE: renewed.certificate.pem}
    try:
        _write_folder(keys_dir / NEXT_DIR, files)
    except OSError as problem:
        raise _unwritable(keys_dir, problem) from None
    return renewed


def prepared(keys_dir: Path) -> Identity | None:
    """The prepared identity; None before `prepare` and after `activate`."""
    folder = keys_dir / NEXT_DIR
    if not (folder / _CERTIFICATE).exists():
        return None
    if not (folder / _KEY).exists():
        return Identity.load(keys_dir)  # an activation was interrupted after the key was moved
    try:
        return Identity.load_pair(keys_dir, folder / _KEY, folder / _CERTIFICATE)
    except ConfigError as problem:
        raise ConfigError(
            f"the prepared certificate cannot be used: {problem}",
            hint=f"remove {folder}, and run `lightyear-node renew` again",
        ) from None


def activate(keys_dir: Path) -> Identity:
    """Put the prepared pair into use, or complete an interrupted activation."""
    renewed = prepared(keys_dir)
    if renewed is None:
        raise ConfigError(
            f"no new certificate is prepared in {keys_dir / NEXT_DIR}",
            hint="run `lightyear-node renew` first, and have every site add the line it prints;"
            " `lightyear-node id` shows what is in use",
        )
    folder = keys_dir / NEXT_DIR
    try:
        if (folder / _KEY).exists():
            in_use = {name: (keys_dir / name).read_bytes() for name in (_KEY, _CERTIFICATE)}
            _write_folder(keys_dir / PREVIOUS_DIR, in_use)
            _move(_KEY, folder, keys_dir)
        _move(_CERTIFICATE, folder, keys_dir)
        shutil.rmtree(folder)
    except OSError as problem:
        raise _unwritable(keys_dir, problem) from None
    return renewed


def check_listed(renewed: Identity, config: FederationConfig, peers_file: Path) -> None:
    """Refuse a certificate that is not in peers.yaml: every peer would refuse us."""
    listed = config.find(renewed.fingerprint)
    if listed is None or listed.name != renewed.name:
        raise ConfigError(
            f"{peers_file} does not list the new certificate {renewed.fingerprint}"
            f" for {renewed.name} yet",
            hint="have every site add it, this one too: `lightyear-node peers add` and the line"
            " that `lightyear-node renew` prints",
        )


def _write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """Create the folder with all its files, in place of an existing one."""
    with staged_directory(folder) as temporary:
        for name, content in files.items():
            write_private(temporary / name, content)


def _move(name: str, source: Path, target: Path) -> None:
    """Move a file to another folder; durable, in both folders, when this returns."""
    rename_durably(source / name, target / name)
    sync(source)


def _unwritable(keys_dir: Path, problem: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write keys to {keys_dir}: {problem.strerror}",
        hint="check the owner and mode of the folder, and the disk",
    )
