"""What `check` finds at this site itself, on real folders, ports and workers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightyear_node.config.agreement import load_agreement
from lightyear_node.home import Home, load_home
from lightyear_node.identity import LIFETIME, make_identity
from lightyear_node.joining import Joined
from lightyear_node.journal import Journal
from lightyear_node.lab.federation import SiteHome, lay_out, package_environment, site_names
from lightyear_node.peers_file import peer_of, write_agreement
from lightyear_node.preflight import (
    OurModel,
    ask_peers,
    model_checks,
    port_checks,
    settings_checks,
    state_checks,
)
from lightyear_node.records import Check, Digest, Mark, PeerName
from lightyear_node.transport.diagnose import UNKNOWN_DIGEST, Diagnosis

NOW = datetime.now(UTC)
SCHEMA = Digest("5" * 64)


@pytest.fixture
def site(tmp_path: Path) -> SiteHome:
    return lay_out(tmp_path, site_names(2))[0]


def loaded(site: SiteHome, **settings: Any) -> Home:
    peers = site.directory / "peers.yaml"
    return load_home(site.directory, peers, environment={}, flags=settings, now=NOW)


def run(site: SiteHome, *arguments: str) -> tuple[int, dict[str, Check]]:
    """`check`'s exit code and findings, as a program would read them."""
    ended = subprocess.run(
        [sys.executable, "-m", "lightyear_node", "check", "--format", "json", *arguments],
        cwd=site.directory,
        env=package_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "Traceback" not in ended.stderr
    return ended.returncode, by_name(
        Check(**one) for one in json.loads(ended.stdout)["data"]["checks"]
    )


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_settings_that_cannot_be_used_are_a_finding_with_advice(site: SiteHome) -> None:
    os.chmod(site.directory / "keys/tls.key", 0o644)
    code, checks = run(site)
    assert code == 3
    assert list(checks) == ["settings"]
    assert "can be read by others" in checks["settings"].about
    assert "chmod 600" in checks["settings"].advice


def test_a_task_that_cannot_be_built_is_a_finding_and_leaves_no_state(site: SiteHome) -> None:
    path = site.directory / "node.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "task": {"entry": "no:x"}}))
    code, checks = run(site, "--timeout", "1")
    assert code == 3
    assert checks["model"].mark == Mark.BROKEN
    assert "no module named `no`" in checks["model"].about
    assert checks["model"].advice
    assert checks["state"].about.endswith("will be made")
    assert not site.state_dir.exists()


def test_a_certificate_near_its_end_and_a_folder_open_to_others(site: SiteHome) -> None:
    soon = make_identity(site.name, NOW - LIFETIME + timedelta(days=12, hours=1))
    keys = site.directory / "keys"
    for file in keys.iterdir():
        file.unlink()
    soon.save(keys)
    keys.chmod(0o777)
    peers = site.directory / "peers.yaml"
    agreement = load_agreement(peers)
    ours = peer_of(Joined(site.name, site.address, soon.certificate))
    others = agreement.others(site.name)
    write_agreement(peers, agreement.model_copy(update={"peers": (ours, *others)}))
    checks = by_name(settings_checks(loaded(site), NOW))
    assert checks["settings"].mark is Mark.HOLDS
    assert checks["certificate"].mark is Mark.DIFFERS
    assert checks["certificate"].about.startswith("12 days left")
    assert checks["keys"].mark is Mark.DIFFERS
    assert "chmod 700" in checks["keys"].advice


def test_ports_are_free_taken_or_not_ours(site: SiteHome) -> None:
    assert {check.mark for check in port_checks(loaded(site))} == {Mark.HOLDS}
    with socket.create_server(("127.0.0.1", int(site.address.rpartition(":")[2]))):
        checks = by_name(port_checks(loaded(site)))
    assert checks["listen"].mark is Mark.BROKEN
    assert "stop the other program" in checks["listen"].advice
    assert checks["http"].mark is Mark.HOLDS
    # An address of the documentation's own network, which no machine has.
    elsewhere = by_name(port_checks(loaded(site, listen="203.0.113.7:7443")))["listen"]
    assert elsewhere.mark is Mark.BROKEN
    assert "0.0.0.0:7443" in elsewhere.advice


def test_a_way_in_for_other_machines_is_looked_at(site: SiteHome) -> None:
    def checked(**http: object) -> Check:
        listen = f"0.0.0.0:{site.http_address.rpartition(':')[2]}"
        return by_name(port_checks(loaded(site, http={"listen": listen, **http})))["http"]

    assert checked().mark is Mark.BROKEN
    assert "http.token_file" in checked().advice
    assert "token is missing" in checked(token_file="token").about
    (site.directory / "token").write_text("0" * 64)
    (site.directory / "token").chmod(0o600)
    assert checked(token_file="token").mark is Mark.DIFFERS
    assert "unencrypted" in checked(token_file="token").about


def test_a_state_directory_that_cannot_be_written(site: SiteHome) -> None:
    home = loaded(site, state_dir="node.yaml/state")
    assert by_name(state_checks(home, None))["state"].mark is Mark.BROKEN


def test_the_disk_must_hold_every_sites_model(site: SiteHome) -> None:
    home = loaded(site)
    assert by_name(state_checks(home, OurModel(raw_bytes=1)))["disk"].mark is Mark.HOLDS
    disk = by_name(state_checks(home, OurModel(raw_bytes=2**50)))["disk"]
    assert disk.mark is Mark.BROKEN
    # Five models, three updates of ours and one of the other site, two states of the optimizer of
    # two models each, three encoded copies; two models are to stay free, and some MiB are lost.
    assert f"{18 * 2**20:.1f} GiB needed" in disk.about
    assert f"{2 * 2**20:.1f} GiB are to stay free" in disk.about


def test_a_quota_that_no_round_could_live_with_is_a_finding(site: SiteHome) -> None:
    home = loaded(site, disk={"quota": "100MiB"}, keep={"models": 1})
    assert by_name(state_checks(home, OurModel(raw_bytes=1)))["disk"].mark is Mark.HOLDS
    disk = by_name(state_checks(home, OurModel(raw_bytes=50 << 20)))["disk"]
    assert disk.mark is Mark.BROKEN
    assert "disk.quota is 100.0 MiB, but this site's rounds need 358.0 MiB: 3 models" in disk.about
    assert "disk.quota" in disk.advice


def test_little_to_spare_is_a_warning(site: SiteHome, monkeypatch: pytest.MonkeyPatch) -> None:
    actual = shutil.disk_usage(site.directory)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: actual._replace(free=100 << 20))
    home = loaded(site, disk={"reserve": "50MB"})
    disk = by_name(state_checks(home, OurModel(raw_bytes=1)))["disk"]
    assert disk.mark is Mark.DIFFERS
    assert "47.7 MiB are to stay free: little to spare" in disk.about
    home = loaded(site, disk={"reserve": "99MiB"})
    assert by_name(state_checks(home, OurModel(raw_bytes=1)))["disk"].mark is Mark.BROKEN


def test_a_state_of_another_model_is_found(site: SiteHome) -> None:
    site.state_dir.mkdir()
    journal = Journal(site.state_dir / "journal.db")
    journal.append("start", {}, wall_ns=0, lamport=1, round=0, remember={"schema": SCHEMA})
    journal.close()
    home = loaded(site)
    assert by_name(state_checks(home, OurModel(SCHEMA)))["state"].mark is Mark.HOLDS
    other = by_name(state_checks(home, OurModel(Digest("6" * 64))))["state"]
    assert other.mark is Mark.BROKEN
    assert "other tensors" in other.about


def test_a_damaged_journal_is_a_finding(site: SiteHome) -> None:
    site.state_dir.mkdir()
    (site.state_dir / "journal.db").write_bytes(b"rubbish" * 1000)
    [state] = state_checks(loaded(site), None)
    assert state.mark is Mark.BROKEN
    assert "backup" in state.advice


def test_the_model_is_built_as_the_node_would_and_nothing_is_left(site: SiteHome) -> None:
    before = sorted(site.directory.rglob("*"))
    checks, model = asyncio.run(model_checks(loaded(site)))
    assert by_name(checks)["device"].about
    assert model is not None
    assert UNKNOWN_DIGEST not in (model.schema, model.initial_model)
    assert sorted(site.directory.rglob("*")) == before


def test_a_site_that_trains_alone_has_nobody_to_ask(site: SiteHome) -> None:
    path = site.directory / "peers.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "rule": {"name": "local"}}))
    code, checks = run(site, "--no-model")
    assert code == 0
    assert "trains alone" in checks["listen"].about


def test_a_peer_without_address_is_not_asked(site: SiteHome) -> None:
    home = loaded(site)
    peers = [peer.model_copy(update={"address": None}) for peer in home.agreement.peers]
    agreement = home.agreement.model_copy(update={"peers": tuple(peers)})
    silent = dataclasses.replace(home, agreement=agreement)
    told: list[Diagnosis] = []
    found = asyncio.run(
        ask_peers(
            silent, [PeerName("site-b")], OurModel(), now=NOW, timeout_s=1.0, tell=told.append
        )
    )
    assert found == told
    assert not found[0].broken
    assert "it dials us" in found[0].about
