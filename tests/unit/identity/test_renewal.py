"""Renewal of a certificate, with crashes at every step on the disk."""

from __future__ import annotations

import os
import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.config.federation import FederationConfig
from lightyear_node.errors import ConfigError
from lightyear_node.identity import renewal
from lightyear_node.identity.invite import Invite
from lightyear_node.identity.keys import LIFETIME, Identity, make_identity
from lightyear_node.tools.peers_file import peer_of
from lightyear_node.types import PeerName

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
LATER = NOW + timedelta(days=700)
OLD = make_identity("site-a", NOW)
ON_DISK = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
KILLED = 9


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    OLD.save(tmp_path / "keys")
    return tmp_path / "keys"


def test_a_renewal_keeps_the_name_and_the_signing_key(keys: Path) -> None:
    renewed = renewal.prepare(keys, LATER)
    assert renewed.name == OLD.name
    assert renewed.certificate.signing_key == OLD.certificate.signing_key
    assert renewed.fingerprint != OLD.fingerprint
    assert renewed.tls_key_pem != OLD.tls_key_pem
    assert renewed.certificate.expires == LATER + LIFETIME
    assert Identity.load(keys).certificate == OLD.certificate, "not in use before it is activated"


def test_preparing_again_changes_nothing(keys: Path) -> None:
    assert renewal.prepared(keys) is None
    first = renewal.prepare(keys, NOW)
    assert renewal.prepare(keys, LATER).certificate == first.certificate


def test_only_the_owner_can_read_a_prepared_pair(keys: Path) -> None:
    renewal.prepare(keys, NOW)
    renewal.activate(keys)
    renewal.prepare(keys, NOW)
    for folder in (keys / "next", keys / "previous"):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


def test_activating_swaps_the_pair_and_keeps_the_old_one(keys: Path) -> None:
    for _ in range(2):
        before = Identity.load(keys)
        renewed = renewal.prepare(keys, LATER)
        assert renewal.activate(keys).certificate == renewed.certificate
        assert Identity.load(keys).certificate == renewed.certificate
        previous = keys / "previous"
        kept = Identity.load_pair(keys, previous / "tls.key", previous / "tls.crt")
        assert kept.certificate == before.certificate
        assert not (keys / "next").exists()
    with pytest.raises(ConfigError, match="no new certificate is prepared") as caught:
        renewal.activate(keys)
    assert "lightyear-node renew" in str(caught.value.hint)


def test_a_damaged_preparation_is_refused_with_a_hint(keys: Path) -> None:
    renewal.prepare(keys, NOW)
    (keys / "next/tls.crt").write_bytes(OLD.certificate.pem)
    with pytest.raises(ConfigError, match="does not belong") as caught:
        renewal.activate(keys)
    assert f"remove {keys / 'next'}" in str(caught.value.hint)
    assert Identity.load(keys).certificate == OLD.certificate


def test_a_certificate_that_is_not_in_peers_yaml_is_refused(keys: Path) -> None:
    renewed = renewal.prepare(keys, NOW)
    for listed, fits in ((OLD, False), (make_identity("site-b", NOW), False), (renewed, True)):
        peer = peer_of(Invite(PeerName(listed.name), "h:1", listed.certificate))
        agreement = FederationConfig(version=1, federation="ward", peers=(peer,))
        if fits:
            renewal.check_listed(renewed, agreement, Path("peers.yaml"))
            continue
        with pytest.raises(ConfigError, match=r"peers\.yaml does not list the new certificate"):
            renewal.check_listed(renewed, agreement, Path("peers.yaml"))


def killed_before_step(keys: Path, step: int, work: Any) -> bool:
    """Do the work in a child process that is killed before its n-th step on the disk."""
    child = os.fork()
    if child == 0:
        steps = 0

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal steps
            if event in ON_DISK and str(keys) in str(arguments[0]):
                steps += 1
                if steps > step:
                    os._exit(KILLED)

        try:
            sys.addaudithook(count)
            work(keys)
        except BaseException:
            os._exit(1)
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, KILLED)
    return ended == KILLED


def test_a_crash_during_activation_leaves_a_working_pair(keys: Path) -> None:
    renewal.prepare(keys, NOW)
    renewal.activate(keys)  # so that there is a previous pair to be replaced
    old, renewed = Identity.load(keys), renewal.prepare(keys, LATER)
    seen = []
    for step in range(100):
        trial = keys.with_name(f"trial-{step}")
        shutil.copytree(keys, trial)
        killed = killed_before_step(trial, step, renewal.activate)
        found = Identity.load(trial)
        seen.append(found.certificate == renewed.certificate)
        assert found.certificate in (old.certificate, renewed.certificate)
        # Repeating the command completes the activation.
        if renewal.prepared(trial) is not None:
            renewal.activate(trial)
        assert Identity.load(trial).certificate == renewed.certificate
        previous = trial / "previous"
        kept = Identity.load_pair(trial, previous / "tls.key", previous / "tls.crt")
        assert kept.certificate == old.certificate
        if not killed:
            break
    assert not killed
    assert len(seen) > 10
    assert seen == sorted(seen), "never back to the old one"
    assert {False, True} == set(seen)


def test_preparation_can_be_repeated_after_a_crash(keys: Path) -> None:
    for step in range(100):
        trial = keys.with_name(f"trial-{step}")
        shutil.copytree(keys, trial)
        killed = killed_before_step(trial, step, lambda at: renewal.prepare(at, NOW))
        assert Identity.load(trial).certificate == OLD.certificate
        renewed = renewal.prepare(trial, NOW)
        assert renewal.activate(trial).certificate == renewed.certificate
        if not killed:
            break
    assert not killed
    assert step > 5
