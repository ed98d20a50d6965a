"""Configuration changes of a running node: how they are detected and classified."""

from __future__ import annotations

import asyncio
import io
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.config.federation import FederationConfig, RuleConfig, load_federation_config
from lightyear_node.errors import ConfigError
from lightyear_node.identity import renewal
from lightyear_node.identity.invite import Invite, invite_line, parse_invite
from lightyear_node.identity.keys import make_identity
from lightyear_node.lab.federation import lay_out, site_names
from lightyear_node.node import config_reload
from lightyear_node.node.config_changes import ConfigChanges, adopted, compare
from lightyear_node.node.config_reload import ConfigWatcher
from lightyear_node.node.home import Home, load_home
from lightyear_node.tools.peers_file import add_peers, peer_of, remove_peer, write_peers_file
from lightyear_node.types import PeerName

NOW = datetime.now(UTC)
A, B, C, D = (PeerName(f"site-{letter}") for letter in "abcd")


class Folder:
    """The home of site-a, among three sites."""

    def __init__(self, path: Path) -> None:
        self.homes = lay_out(path, site_names(3), rounds=5)
        self.directory = self.homes[0].directory
        self.peers = self.directory / "peers.yaml"

    def load(self) -> Home:
        return load_home(self.directory, self.peers, environment={}, flags={}, now=NOW)

    def change(self, **changed: Any) -> None:
        values = load_federation_config(self.peers).model_dump()
        write_peers_file(self.peers, FederationConfig(**{**values, **changed}))

    def pin_another(self, name: PeerName, address: str | None = None) -> str:
        """A new certificate for a site; returns its fingerprint."""
        home = next(home for home in self.homes if home.name == name)
        renewed = renewal.prepare(home.directory / "keys", NOW)
        line = invite_line(renewed, address or home.address)
        add_peers(self.peers, [parse_invite(line)], None)
        return renewed.fingerprint


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_equal_configurations_have_no_changes(folder: Folder) -> None:
    changes = compare(folder.load(), folder.load())
    assert changes == ConfigChanges()
    assert not changes


def test_a_second_certificate_is_added_and_the_first_removed(folder: Folder) -> None:
    start = folder.load()
    old = start.certificates[B][0].fingerprint
    new = folder.pin_another(B)
    both = folder.load()
    changes = compare(start, both)
    assert changes == ConfigChanges(pinned=((B, new),))
    assert changes.affected() == {B}
    assert not changes.distrusted(), "what runs under the old pin may end"
    assert changes.to_plain() == {"pinned": [[B, new]]}

    remove_peer(folder.peers, B, old)
    changes = compare(both, folder.load())
    assert changes == ConfigChanges(unpinned=((B, old),))
    assert changes.distrusted() == changes.affected() == {B}
    assert f"{old} of site-b is no longer accepted" in str(changes)


def test_renewal_of_our_own_certificate(folder: Folder) -> None:
    start = folder.load()
    new = folder.pin_another(A)
    pinned = folder.load()
    assert compare(start, pinned) == ConfigChanges(pinned=((A, new),))
    renewal.activate(folder.directory / "keys")
    changes = compare(pinned, folder.load())
    assert changes == ConfigChanges(renewed=True)
    in_force = adopted(pinned, folder.load())
    assert in_force.identity.fingerprint == new
    remove_peer(folder.peers, A, start.identity.fingerprint)
    changes = compare(in_force, folder.load())
    assert changes == ConfigChanges(unpinned=((A, start.identity.fingerprint),))


def test_a_changed_address(folder: Folder) -> None:
    start = folder.load()
    folder.pin_another(B, address="elsewhere:1")
    changes = compare(start, folder.load())
    assert changes.moved == (B,)
    assert adopted(start, folder.load()).address_of(B) == "elsewhere:1"


def test_a_peer_is_removed_and_comes_back(folder: Folder) -> None:
    start, before = folder.load(), folder.peers.read_bytes()
    remove_peer(folder.peers, C)
    changes = compare(start, folder.load())
    assert changes == ConfigChanges(removed=(C,))
    assert changes.distrusted() == {C}
    in_force = adopted(start, folder.load())
    assert in_force.others == (B,)
    assert set(in_force.pins) == {B}
    assert in_force.federation.digest() == folder.load().federation.digest()
    folder.peers.write_bytes(before)
    assert compare(in_force, folder.load()) == ConfigChanges(joined=(C,))


def test_a_site_joins_and_barrier_settings_change(folder: Folder) -> None:
    start = folder.load()
    barrier = {**start.federation.barrier.model_dump(), "grace": 99.0}
    stranger = make_identity(D, NOW)
    add_peers(folder.peers, [Invite(D, "d:1", stranger.certificate)], None)
    folder.change(rounds=9, barrier=barrier)
    changes = compare(start, folder.load())
    assert changes == ConfigChanges(joined=(D,), live_settings=("rounds", "barrier.grace"))
    assert changes.affected() == {D}
    assert changes.to_plain() == {"joined": [D], "terms": ["rounds", "barrier.grace"]}
    assert str(changes) == (
        "site-d has joined, `rounds` has another value, `barrier.grace` has another value"
    )
    in_force = adopted(start, folder.load())
    assert in_force.others == (B, C, D)
    assert (in_force.parameters().rounds, in_force.parameters().grace_s) == (9, 99.0)
    assert in_force.federation.digest() == folder.load().federation.digest()


def test_settings_that_models_depend_on_wait_for_a_restart(folder: Folder) -> None:
    start = folder.load()
    folder.change(seed=3, federation="other", rule={"name": "local"})
    (folder.directory / "node.yaml").write_text("device: cpu\nlisten: 127.0.0.1:7\n")
    changes = compare(start, folder.load())
    assert not changes, "the members are the same under another rule"
    assert set(changes.postponed) >= {
        "federation",
        "seed",
        "rule.name",
        "node.yaml: device",
        "node.yaml: listen",
    }
    in_force = adopted(start, folder.load())
    assert in_force.federation == start.federation
    assert in_force.config == start.config
    assert in_force.others == (B, C)


def test_a_changed_name_waits_for_a_restart(folder: Folder, tmp_path: Path) -> None:
    start = folder.load()
    other = load_home(folder.homes[1].directory, folder.peers, environment={}, flags={}, now=NOW)
    changes = compare(start, replace(other, config=start.config))
    assert changes == ConfigChanges(postponed=("our new name site-b",))


def test_a_site_that_trains_alone_ignores_membership_changes(folder: Folder) -> None:
    folder.change(rule=RuleConfig(name="local").model_dump(exclude_unset=True))
    start = folder.load()
    folder.pin_another(B)
    remove_peer(folder.peers, C)
    assert compare(start, folder.load()) == ConfigChanges()


# -- watching -------------------------------------------------------------------------------------


class Watcher:
    """A watcher of the folder's files with a short interval."""

    def __init__(self, folder: Folder, load: Callable[[], Home] | None = None) -> None:
        self.log = io.StringIO()
        logger = logging.Logger("test")
        logger.addHandler(logging.StreamHandler(self.log))
        self.loads = 0

        def counted() -> Home:
            self.loads += 1
            return (load or folder.load)()

        self.usable: list[bool] = []
        self.watch = ConfigWatcher(counted, folder.load().watched, logger, self.usable.append)

    async def changed(self, within_s: float = 20) -> Home:
        async with asyncio.timeout(within_s):
            return await self.watch.changed()


def test_the_first_look_always_reads_and_later_ones_only_after_changes(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_reload, "POLL_S", 0.02)

    async def scenario() -> None:
        watcher = Watcher(folder)
        remove_peer(folder.peers, C)
        assert (await watcher.changed()).others == (B,)
        with pytest.raises(TimeoutError):
            await watcher.changed(within_s=0.3)
        assert watcher.loads == 1, "a steady state reads nothing"
        new = folder.pin_another(B)
        assert (await watcher.changed()).certificates[B][1].fingerprint == new
        folder.pin_another(A)
        await watcher.changed()
        renewal.activate(folder.directory / "keys")
        assert (await watcher.changed()).identity.fingerprint != make_identity(A, NOW).fingerprint
        assert watcher.log.getvalue() == ""
        watcher.watch.close()

    asyncio.run(scenario())


def test_an_invalid_file_is_reported_once_and_its_repair_is_detected(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_reload, "POLL_S", 0.02)

    async def scenario() -> None:
        watcher, sound = Watcher(folder), folder.peers.read_bytes()
        await watcher.changed()
        folder.peers.write_bytes(sound[: len(sound) // 2])
        with pytest.raises(TimeoutError):
            await watcher.changed(within_s=0.5)
        os.utime(folder.peers)  # another change that leaves it as broken as it was
        with pytest.raises(TimeoutError):
            await watcher.changed(within_s=0.5)
        assert watcher.loads == 3
        [line] = watcher.log.getvalue().splitlines()
        assert line.startswith(f"the settings stay as they are: {folder.peers}")
        # Every request gets the answer again.
        watcher.watch.ask()
        with pytest.raises(TimeoutError):
            await watcher.changed(within_s=0.5)
        assert len(watcher.log.getvalue().splitlines()) == 2
        folder.peers.write_bytes(sound)
        assert (await watcher.changed()).others == (B, C)
        assert watcher.usable == [True, False, False, False, True]
        watcher.watch.close()

    asyncio.run(scenario())


def test_files_that_change_while_they_are_read_are_read_again(folder: Folder) -> None:
    """A key whose certificate follows a moment later is neither an error nor a change."""

    async def scenario() -> None:
        reads = 0

        def load() -> Home:
            nonlocal reads
            reads += 1
            if reads == 1:
                remove_peer(folder.peers, C)
                raise ConfigError("tls.key does not belong to tls.crt")
            return folder.load()

        watcher = Watcher(folder, load)
        assert (await watcher.changed()).others == (B,)
        assert watcher.log.getvalue() == ""
        watcher.watch.close()

    asyncio.run(scenario())


def test_peers_with_one_certificate_are_written_in_the_old_form(folder: Folder) -> None:
    before = folder.peers.read_bytes()
    old = folder.load().certificates[B][0].fingerprint
    new = folder.pin_another(B)
    remove_peer(folder.peers, B, new)
    assert folder.load().certificates[B][0].fingerprint == old
    assert folder.peers.read_bytes() == before
    assert peer_of(Invite(B, "b:1", folder.load().certificates[B][0])).fingerprint == (old,)
