"""Incompatible sites and unauthenticated clients are refused and counted; the others continue."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lightyear_node.errors import PeerError
from lightyear_node.identity.keys import Identity, make_identity
from lightyear_node.lab.federation import Federation, SiteHome
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.storage.hash_chain import Record
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.codec import ChunkGrid
from lightyear_node.types import Announcement, Digest, Generation, Manifest, PeerName, Round, Update
from tests.support.site_queries import (
    DEADLINE_S,
    A,
    B,
    C,
    LayOut,
    change_yaml,
    check_histories,
    durable_values,
    finished,
    metrics_of,
    phase_of,
    wait_for_phase,
)

D = PeerName("site-d")

OTHER_MODEL = """
from torch import nn
from lightyear_node.lab.tasks import digits

def build(**arguments):
    task = digits.build(**arguments)
    task.model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 10))
    return task
"""


def test_a_site_with_another_model_or_federation_or_nan_is_refused_with_its_reason(
    lay_out_sites: LayOut, records: Callable[[SiteHome], list[Record]]
) -> None:
    homes = lay_out_sites(
        5, rounds=2, malfunctions={PeerName("site-e"): MalfunctionConfig(kind="nan")}
    )
    other_model, other_federation = homes[2], homes[3]
    (other_model.directory / "other.py").write_text(OTHER_MODEL)
    change_yaml(other_model.directory / "node.yaml", task={"entry": "other:build"})
    change_yaml(other_federation.directory / "peers.yaml", federation="another")
    with Federation(homes) as federation:
        statuses = federation.wait_until(finished(A, B), DEADLINE_S)
        for home in homes[:2]:
            metrics = metrics_of(home)
            for peer, reason in ((C, "schema_mismatch"), (D, "federation")):
                assert (
                    metrics[f'lightyear_peer_refusals_total{{peer="{peer}",reason="{reason}"}}'] > 0
                )
            nonfinite = (
                'lightyear_peer_verdicts_total{peer="site-e",reason="nonfinite",verdict="rejected"}'
            )
            assert metrics[nonfinite] > 0
            status = statuses[home.name]
            assert status is not None
            about = {peer["name"]: peer for peer in status["peers"]}
            assert about[C]["state"] == "refused"
            assert "other tensors" in about[C]["about"]
            assert about[D]["state"] == "refused"
            assert "'another'" in about[D]["about"]
    check_histories([homes[0], homes[1], homes[4]], records)


def test_a_stranger_gets_no_answer_and_a_member_cannot_impersonate_another(
    lay_out_sites: LayOut,
) -> None:
    homes = lay_out_sites(2, rounds=50)
    node, other = homes
    identity = Identity.load(other.directory / "keys")
    certificate = Identity.load(node.directory / "keys").certificate

    async def announce(caller: Identity) -> Announcement:
        client = PeerClient(
            node.name, DirectChannel(node.name, node.address, [certificate], caller)
        )
        try:
            return await client.announce(Announcement(1, Round(0), "training", None))
        finally:
            await client.close()

    with Federation([node]) as federation:
        federation.wait_until(lambda s: s[node.name] is not None, DEADLINE_S)
        refused = 'lightyear_authentication_failures_total{reason="handshake"}'
        assert asyncio.run(announce(identity)).phase
        time.sleep(1.1)  # metrics may be a second old
        assert metrics_of(node)[refused] == 0
        # The same call by a site that is not pinned; gRPC may connect twice before it fails.
        stranger = make_identity("site-b", datetime.now(UTC))
        with pytest.raises(PeerError):
            asyncio.run(announce(stranger))
        federation.wait_until(lambda s: metrics_of(node)[refused] >= 1, DEADLINE_S)


def test_a_node_serves_only_what_it_announced(lay_out_sites: LayOut, tmp_path: Path) -> None:
    """Other sites' updates are in the same folder, and are not served."""
    node, other = lay_out_sites(2, rounds=50)
    identity = Identity.load(other.directory / "keys")
    certificate = Identity.load(node.directory / "keys").certificate
    received = BlobStore(tmp_path / "received")

    async def fetch(manifest: Manifest, header: bytes) -> None:
        client = PeerClient(
            node.name, DirectChannel(node.name, node.address, [certificate], identity)
        )
        try:
            await client.fetch(manifest, received, ChunkGrid(header))
        finally:
            await client.close()

    with Federation([node, other]) as federation:
        federation.wait_until(
            lambda s: phase_of(s, node.name) not in (None, "starting", "observing"), DEADLINE_S
        )
        federation.kill(other.name, signal.SIGSTOP)  # so that the round stays open
        wait_for_phase(federation, node, "collecting")
        newest = durable_values(node)["manifest"]["manifest"]["update"]["digest"]
        announced = node.state_dir / "updates" / newest
        content = announced.read_bytes()
        header = content[: 8 + int.from_bytes(content[:8], "little")]
        updates = BlobStore(node.state_dir / "updates")
        scratch = updates.scratch_path()
        scratch.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        foreign = updates.adopt(scratch)

        def manifest(digest: str) -> Manifest:
            update = Update(node.name, Generation(0), Round(0), Digest(digest))
            return Manifest("demo", update, 0, Digest("0" * 64), len(content), 0)

        asyncio.run(fetch(manifest(announced.name), header))
        assert received.verify(Digest(announced.name))
        with pytest.raises(PeerError):
            asyncio.run(fetch(manifest(foreign.digest), header))
        assert not received.has(foreign.digest)


def test_a_port_in_use_and_a_second_daemon_are_refused(lay_out_sites: LayOut) -> None:
    homes = lay_out_sites(2, rounds=50)
    with Federation(homes[:1]) as federation:
        federation.wait_until(lambda s: s[A] is not None, DEADLINE_S)
        second = Federation(homes[:1])
        second.start(A)
        assert second.wait_for_exit(A, 60) == 75
        assert "another node" in homes[0].log.read_text()

        change_yaml(homes[1].directory / "node.yaml", listen=homes[0].address)
        intruder = Federation(homes[1:])
        intruder.start(B)
        assert intruder.wait_for_exit(B, 60) == 78
        assert f"cannot listen on {homes[0].address}" in homes[1].log.read_text()
        assert federation.status()[A] is not None
