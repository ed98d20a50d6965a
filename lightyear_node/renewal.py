"""A new TLS key and certificate for a site that keeps its name and its signing key.

    keys/next/       prepared: the others are told of it, and pin it beside the old one
    keys/            in use
    keys/previous/   the pair that was in use before

Owns the order of the steps on the disk.  Two files cannot be replaced at one instant, so the key
goes first, and `Identity.load` takes the certificate from `next/` as long as it is there alone:
whatever crashes when, what is loaded is one matching pair, the old or the new.
"""

from __future__ import annotations

import os
import shutil
from datetime import datetime
from pathlib import Path

from lightyear_node.config.agreement import Agreement
from lightyear_node.errors import ConfigError
from lightyear_node.identity import NEXT_DIR, Identity, make_identity
from lightyear_node.private_files import write_private

PREVIOUS_DIR = "previous"
_KEY, _CERTIFICATE = "tls.key", "tls.crt"


def prepare(keys_dir: Path, now: datetime) -> Identity:
    """The prepared identity; made now, unless it was before."""
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
    """What the next activation puts into use; None before `prepare` and after `activate`."""
    folder = keys_dir / NEXT_DIR
    if not (folder / _CERTIFICATE).exists():
        return None
    if not (folder / _KEY).exists():
        return Identity.load(keys_dir)  # an activation was cut short: half of it is in use
    try:
        return Identity.load_pair(keys_dir, folder / _KEY, folder / _CERTIFICATE)
    except ConfigError as problem:
        raise ConfigError(
            f"the prepared certificate cannot be used: {problem}",
            hint=f"remove {folder}, and run `lightyear-node renew` again",
        ) from None


def activate(keys_dir: Path) -> Identity:
    """Put the prepared pair into use, or finish what an interrupted activation has begun."""
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
            os.replace(folder / _KEY, keys_dir / _KEY)
            _sync(keys_dir, folder)
        os.replace(folder / _CERTIFICATE, keys_dir / _CERTIFICATE)
        _sync(keys_dir, folder)
        shutil.rmtree(folder)
    except OSError as problem:
        raise _unwritable(keys_dir, problem) from None
    return renewed


def check_listed(renewed: Identity, agreement: Agreement, peers_file: Path) -> None:
    """Refuse a certificate that the federation's file does not have: nobody would talk to us."""
    listed = agreement.find(renewed.fingerprint)
    if listed is None or listed.name != renewed.name:
        raise ConfigError(
            f"{peers_file} does not list the new certificate {renewed.fingerprint}"
            f" for {renewed.name} yet",
            hint="have every site add it, this one too: `lightyear-node peers add` and the line"
            " that `lightyear-node renew` prints",
        )


def _write_folder(folder: Path, files: dict[str, bytes]) -> None:
    """The folder appears with all its files, in place of one that was there before."""
    scratch = folder.with_name(folder.name + ".new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    for name, content in files.items():
        write_private(scratch / name, content)
    _sync(scratch)
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(scratch, folder)
    _sync(folder.parent)


def _sync(*folders: Path) -> None:
    """A rename is durable when its folder is."""
    for folder in folders:
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _unwritable(keys_dir: Path, problem: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write keys to {keys_dir}: {problem.strerror}",
        hint="check the owner and mode of the folder, and the disk",
    )
