"""A full disk during rounds: the site reports it, waits, and continues when there is space."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from lightyear_node.errors import StoreError
from lightyear_node.identity.keys import Identity
from lightyear_node.lab.federation import Federation, SiteHome, package_environment
from lightyear_node.storage import safetensors_header
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.storage.state_directory import StateDirectory
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.codec import ChunkGrid
from lightyear_node.types import SignedManifest
from tests.support.site_queries import (
    DEADLINE_S,
    A,
    B,
    C,
    LayOut,
    Records,
    check_histories,
    durable_state,
    metrics_of,
)
from tests.support.small_disks import fill, free, small_disk

DISK_MIB = 48
TOO_FULL, AGAIN = "is too full", "there is room again"


def problems_of(home: SiteHome) -> list[str]:
    """Return the problems that `/readyz` reports."""
    try:
        with urllib.request.urlopen(f"http://{home.http_address}/readyz", timeout=10) as answer:
            return list(json.load(answer)["problems"])
    except urllib.error.HTTPError as refusal:
        return list(json.load(refusal)["problems"])


def wait_for_round(federation: Federation, home: SiteHome, round: int) -> None:
    federation.wait_until(
        lambda s: s[home.name] is not None and s[home.name]["round"] >= round, DEADLINE_S
    )


def round_of(federation: Federation, home: SiteHome) -> int:
    status = federation.status()[home.name]
    assert status is not None
    return int(status["round"])


def health(home: SiteHome) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightyear_node", "health"],
        cwd=home.directory,
        env=package_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def fetched_from(home: SiteHome, asking: SiteHome, folder: Path) -> str:
    """Fetch the newest update of `home` as its peer `asking`; return its digest."""
    _, signed = durable_state(home)
    manifest = SignedManifest.from_plain(signed).manifest
    us = Identity.load(asking.directory / "keys")
    theirs = Identity.load(home.directory / "keys").certificate
    updates = home.state_dir / "updates"
    store = BlobStore(folder)

    async def fetch() -> None:
        assert home.address is not None
        client = PeerClient(home.name, DirectChannel(home.name, home.address, (theirs,), us))
        try:
            with (updates / manifest.update.digest).open("rb") as file:
                grid = ChunkGrid(safetensors_header.read(file))
            await client.fetch(manifest, store, grid)
        finally:
            await client.close()

    asyncio.run(fetch())
    assert store.verify(manifest.update.digest)
    return manifest.update.digest


def test_a_full_disk_stops_only_its_own_site(
    lay_out_sites: LayOut, records: Records, tmp_path: Path
) -> None:
    homes = lay_out_sites(rounds=400)
    a, b, c = homes
    with small_disk(c.state_dir, DISK_MIB), Federation(homes) as federation:
        wait_for_round(federation, c, 2)
        assert problems_of(c) == []
        junk = fill(c.state_dir)
        # The worker may be replaced meanwhile, another reason for not being ready.
        problem = ""

        def says_so(_: object) -> bool:
            nonlocal problem
            problem = next((one for one in problems_of(c) if TOO_FULL in one), "")
            return bool(problem)

        federation.wait_until(says_so, DEADLINE_S)
        assert f"the file system at {c.state_dir} {TOO_FULL}: " in problem
        assert " free, " in problem
        assert " needed" in problem
        assert metrics_of(c)["lightyear_disk_low"] == 1
        assert metrics_of(c)["lightyear_disk_free_bytes"] < 8 << 20
        unready = health(c)
        assert unready.returncode == 3
        assert TOO_FULL in unready.stderr

        # The others continue, see its state, and can fetch what it has announced.
        wait_for_round(federation, a, round_of(federation, a) + 3)
        seen = federation.status()[A]
        assert seen is not None
        [view] = [peer for peer in seen["peers"] if peer["name"] == C]
        assert view["state"] == "reachable"
        stuck = round_of(federation, c)
        fetched_from(c, b, tmp_path / "fetched")

        junk.unlink()
        federation.wait_until(lambda _: problems_of(c) == [], DEADLINE_S)
        wait_for_round(federation, c, max(stuck + 2, round_of(federation, a)))
        assert metrics_of(c)["lightyear_disk_low"] == 0
        assert health(c).returncode == 0
        federation.stop()
        check_histories(homes, records)
        log = c.log.read_text()
        assert log.count(TOO_FULL) == log.count(AGAIN) == 1
        assert "Traceback" not in log


def test_a_site_survives_free_space_that_varies_at_any_time(
    lay_out_sites: LayOut, records: Records
) -> None:
    """The step that finds no space is retried when there is some."""
    homes = lay_out_sites(2, rounds=400)
    b = homes[1]
    with small_disk(b.state_dir, DISK_MIB), Federation(homes) as federation:
        wait_for_round(federation, b, 1)
        for _ in range(6):
            reached = round_of(federation, b)
            junk = fill(b.state_dir)
            federation.wait_until(lambda _: bool(problems_of(b)), DEADLINE_S)
            junk.unlink()
            wait_for_round(federation, b, reached + 1)
        federation.stop()
        check_histories(homes, records)
        assert "Traceback" not in b.log.read_text()


def test_a_site_killed_on_a_full_disk_restarts(lay_out_sites: LayOut, records: Records) -> None:
    """It waits, reports it once, and then starts normally."""
    homes = lay_out_sites(2, rounds=400)
    b = homes[1]
    with small_disk(b.state_dir, DISK_MIB), Federation(homes) as federation:
        wait_for_round(federation, b, 2)
        federation.kill(B, signal.SIGKILL)
        federation.wait_for_exit(B)
        memory, manifest = durable_state(b)
        # A start would delete what was being written, and have room again.
        for part in ("updates", "models", "carry"):
            BlobStore(b.state_dir / part).clear_scratch()
        junk = fill(b.state_dir)
        federation.start(B)
        waiting = "delete or move other files there"
        federation.wait_until(lambda _: waiting in b.log.read_text(), DEADLINE_S)
        assert free(b.state_dir) < 1 << 20
        assert durable_state(b) == (memory, manifest)
        junk.unlink()
        wait_for_round(federation, b, memory.round + 2)
        federation.stop()
        check_histories(homes, records)
        assert b.log.read_text().count(waiting) == 1


def test_a_quota_is_kept_and_a_quota_that_is_too_small_is_refused(
    lay_out_sites: LayOut, records: Records
) -> None:
    homes = lay_out_sites(2, rounds=4)
    settings = homes[1].directory / "node.yaml"
    plain = yaml.safe_load(settings.read_text())
    settings.write_text(yaml.safe_dump({**plain, "disk": {"quota": "1MiB"}}))
    with Federation(homes) as federation:
        federation.kill(B, signal.SIGCONT)  # it is expected to exit by itself
        assert federation.wait_for_exit(B, DEADLINE_S) == 78
        assert "disk.quota is 1.0 MiB, but this site's rounds need" in homes[1].log.read_text()
        settings.write_text(yaml.safe_dump({**plain, "disk": {"quota": "12MiB"}}))
        federation.start(B)
        federation.wait_until(
            lambda s: all(one is not None and one["finished"] for one in s.values()), DEADLINE_S
        )
        assert problems_of(homes[1]) == []
    check_histories(homes, records)


def test_a_read_only_disk_is_refused_without_waiting(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with small_disk(folder, 16):
        StateDirectory(folder).close()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with pytest.raises(StoreError, match=r"LOCK: cannot be written: Read-only") as caught:
            StateDirectory(folder)
    assert type(caught.value) is StoreError
    assert "owner, mode and disk" in str(caught.value.hint)
