"""Certificates are renewed and peers removed while sites run, without a restart."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import yaml

from lightyear_node.errors import PeerError
from lightyear_node.identity.invite import parse_invite
from lightyear_node.identity.keys import Certificate, Identity
from lightyear_node.lab.federation import (
    Federation,
    SiteHome,
    Statuses,
    package_environment,
)
from lightyear_node.node.config_reload import POLL_S
from lightyear_node.observe.admin_socket import ask
from lightyear_node.storage.hash_chain import Record
from lightyear_node.tools.peers_file import add_peers, remove_peer
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.client import PeerClient
from lightyear_node.types import Announcement, PeerName, Round
from lightyear_node.v1 import exchange_pb2 as pb
from lightyear_node.v1 import exchange_pb2_grpc
from tests.support.site_queries import (
    DEADLINE_S,
    A,
    B,
    C,
    LayOut,
    check_histories,
    finished,
    metrics_of,
)

IN_FORCE_S = 1.0
"""A removal takes effect within this time after the new file is in place."""
BUSY = 10
"""Or, on a busy machine, within this many of the node's slowest answers."""

WIDE_MODEL = """
from torch import nn
from lightyear_node.lab.tasks import digits

def build(**arguments):
    task = digits.build(**arguments)
    task.model = lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 256), nn.Linear(256, 10)
    )
    return task
"""


def keys_of(home: SiteHome) -> Identity:
    return Identity.load(home.directory / "keys")


def command(home: SiteHome, *arguments: str) -> str:
    """Run a command in the site's home, as its operator."""
    ended = subprocess.run(
        [sys.executable, "-m", "lightyear_node", *arguments],
        cwd=home.directory,
        env=package_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def at_round(name: PeerName, round: int) -> Callable[[Statuses], bool]:
    def reached(statuses: Statuses) -> bool:
        status = statuses[name]
        return status is not None and status["round"] >= round

    return reached


def log_count(home: SiteHome, words: str) -> int:
    return home.log.read_text().count(words)


def shown_by(home: SiteHome, caller: Identity, folder: Path) -> bytes:
    """Return the certificate that a site's port presents."""
    pair = folder / "caller.pem"
    pair.write_bytes(caller.tls_key_pem + caller.certificate.pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(pair)
    host, _, port = home.address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=20) as raw,
        context.wrap_socket(raw) as line,
    ):
        shown = line.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def announce(home: SiteHome, pinned: Certificate, caller: Identity) -> str:
    """Call a site; return its phase, or None if either refuses the other."""

    async def call() -> str:
        client = PeerClient(home.name, DirectChannel(home.name, home.address, [pinned], caller))
        try:
            return (await client.announce(Announcement(1, Round(0), "training", None))).phase
        finally:
            await client.close()

    return asyncio.run(call())


def settings_records(history: list[Record]) -> list[Record]:
    return [record for record in history if record.kind == "settings"]


def test_a_certificate_is_renewed_while_rounds_continue(
    lay_out_sites: LayOut, tmp_path: Path, records: Callable[[SiteHome], list[Record]]
) -> None:
    homes = lay_out_sites(3, rounds=100_000)
    a, b, _ = homes
    old = keys_of(b)
    with Federation(homes) as federation:
        pids = [federation.pid(home.name) for home in homes]
        federation.wait_until(at_round(B, 1), DEADLINE_S)
        expiry = metrics_of(b)["lightyear_certificate_expiry_timestamp_seconds"]

        joined = parse_invite(command(b, "renew"))
        for home in homes:
            add_peers(home.directory / "peers.yaml", [joined], None)
        accepted = f"{joined.certificate.fingerprint} of site-b is accepted"
        federation.wait_until(
            lambda _: all(log_count(home, accepted) for home in homes), DEADLINE_S
        )
        command(b, "renew", "--activate")
        new = keys_of(b)
        assert new.fingerprint == joined.certificate.fingerprint
        federation.wait_until(
            lambda _: shown_by(b, keys_of(a), tmp_path) == new.certificate.der, DEADLINE_S
        )
        # Until the others have removed its pin, the old certificate is still valid for calls.
        assert announce(a, keys_of(a).certificate, old)
        for home in homes:
            command(home, "peers", "remove", "site-b", "--fingerprint", old.fingerprint)
        withdrawn = f"{old.fingerprint} of site-b is no longer accepted"
        statuses = federation.wait_until(
            lambda _: all(log_count(home, withdrawn) for home in homes), DEADLINE_S
        )
        status = statuses[B]
        assert status is not None
        renewed = status["round"]
        assert status["certificate_expires"] == new.certificate.expires.isoformat()
        with pytest.raises(PeerError):
            announce(a, keys_of(a).certificate, old)
        with pytest.raises(PeerError):
            announce(b, old.certificate, keys_of(a))
        assert announce(a, keys_of(a).certificate, new)
        assert announce(b, new.certificate, keys_of(a))

        for home in (a, homes[2]):  # its updates arrive, and count
            federation.wait_until(
                lambda _, name=home.name: any(
                    verdict["peer"] == B and verdict["accepted"]
                    for entry in federation.rounds(name)
                    if entry["round"] > renewed + 1
                    for verdict in entry["verdicts"]
                ),
                DEADLINE_S,
            )
        assert pids == [federation.pid(home.name) for home in homes]
        federation.check()
        assert metrics_of(b)["lightyear_certificate_expiry_timestamp_seconds"] > expiry
    check_histories(homes, records)
    agreed = set()
    for home in homes:
        changed = settings_records(records(home))
        assert [pin for record in changed for pin in record.body.get("pinned", [])] == [
            [B, new.fingerprint]
        ]
        assert [pin for record in changed for pin in record.body.get("unpinned", [])] == [
            [B, old.fingerprint]
        ]
        agreed.add(changed[-1].body["agreement"])
        assert changed[-1].body["certificate"] == keys_of(home).fingerprint
    assert len(agreed) == 1, "all compare the same digest again"


class SlowReader:
    """A member that requests an update and stops reading, so that the server must wait."""

    def __init__(self, node: SiteHome, caller: Identity) -> None:
        options = (
            ("grpc.ssl_target_name_override", node.name),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
            # Limits how much is received before it is read.
            ("grpc.http2.lookahead_bytes", 65536),
            ("grpc.http2.bdp_probe", 0),
        )
        credentials = grpc.ssl_channel_credentials(
            keys_of(node).certificate.pem, caller.tls_key_pem, caller.certificate.pem
        )
        self.channel = grpc.aio.secure_channel(node.address, credentials, options=options)
        self.stub = exchange_pb2_grpc.ExchangeStub(self.channel)

    async def begin(self, digest: str) -> Any:
        call = self.stub.Fetch(pb.FetchRequest(digest=bytes.fromhex(digest)))
        assert await call.read() is not grpc.aio.EOF
        return call


async def first_refusal(stub: Any) -> float:
    """Return when a peer's calls are first refused."""
    request = pb.Announcement(phase="training")
    while True:
        try:
            await stub.Announce(request, timeout=5)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                return time.monotonic()
        await asyncio.sleep(0.01)


def test_a_removed_peer_is_disconnected_within_a_second_and_the_others_continue(
    lay_out_sites: LayOut, records: Callable[[SiteHome], list[Record]]
) -> None:
    homes = lay_out_sites(3, rounds=5)
    for home in homes:
        (home.directory / "wide.py").write_text(WIDE_MODEL)
        settings = yaml.safe_load((home.directory / "node.yaml").read_text())
        settings["task"] = {"entry": "wide:build"}
        (home.directory / "node.yaml").write_text(yaml.safe_dump(settings))
    a, _, c = homes

    async def cut_off(digest: str) -> tuple[float, float, float]:
        answers_s: list[float] = []

        async def ask_meanwhile() -> None:
            while True:
                asked_at = time.monotonic()
                await asyncio.to_thread(ask, a.state_dir, "status")
                answers_s.append(time.monotonic() - asked_at)
                await asyncio.sleep(0.05)

        reader, caller = SlowReader(a, keys_of(c)), SlowReader(a, keys_of(c))
        stalled = await reader.begin(digest)
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            refused = tasks.create_task(first_refusal(caller.stub))
            asking = tasks.create_task(ask_meanwhile())
            await asyncio.to_thread(remove_peer, a.directory / "peers.yaml", C)
            removed_at = time.monotonic()
            assert await stalled.code() is not grpc.StatusCode.OK
            cut_at = time.monotonic()
            refused_at = await refused
            asking.cancel()
        for one in (reader, caller):
            await one.channel.close()
        return cut_at - removed_at, refused_at - removed_at, max(answers_s)

    with Federation(homes) as federation:
        pids = [federation.pid(home.name) for home in homes]
        federation.wait_until(at_round(A, 1), DEADLINE_S)
        *_, sealed = (record for record in records(a) if record.kind == "seal")
        cut_s, refused_s, busy_s = asyncio.run(cut_off(sealed.body["update"]["digest"]))
        print(f"cut off after {cut_s:.3f} s, refused after {refused_s:.3f} s, busy {busy_s:.3f} s")
        assert max(cut_s, refused_s) < IN_FORCE_S + BUSY * busy_s

        statuses = federation.wait_until(finished(A, B), DEADLINE_S)
        assert pids == [federation.pid(home.name) for home in homes]
        status = statuses[A]
        assert status is not None
        states = {peer["name"]: peer["state"] for peer in status["peers"]}
        assert states[C] == "removed"
        assert states[B] == "reachable"
        assert metrics_of(a)["lightyear_peers_configured"] == 1
        assert not [series for series in metrics_of(a) if 'peer="site-c"' in series]
        last = {one["peer"]: one for one in federation.rounds(A)[-1]["verdicts"]}
        assert C not in last, "the rounds go on without it"
        assert last[B]["accepted"]
    history = records(a)
    [changed] = settings_records(history)
    assert changed.body["removed"] == [C]
    after = [r for r in history if r.kind == "decision" and r.seq > changed.seq]
    assert len(after) >= 2
    for decision in after:
        assert C not in [update["peer"] for update in decision.body["accepted"]]
    check_histories(homes, records)


def test_sighup_reloads_a_file_with_an_unchanged_timestamp(lay_out_sites: LayOut) -> None:
    node, other = lay_out_sites(2, rounds=50)
    peers = node.directory / "peers.yaml"
    with Federation([node]) as federation:
        federation.wait_until(lambda s: s[A] is not None, DEADLINE_S)
        federation.kill(A, signal.SIGSTOP)  # so that it reads the file only after both changes
        before = peers.stat()
        text = peers.read_text()
        # As long as before, and no address of the file: two sites with one are refused.
        nearby = (other.address[:-1] + digit for digit in "0123456789")
        elsewhere = next(address for address in nearby if address not in text)
        with peers.open("r+") as file:
            file.write(text.replace(other.address, elsewhere))
        os.utime(peers, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = peers.stat()
        assert (before.st_ino, before.st_size) == (after.st_ino, after.st_size)
        (node.directory / "node.yaml").write_text(
            (node.directory / "node.yaml").read_text() + "device: cpu\n"
        )
        federation.kill(A, signal.SIGCONT)
        federation.kill(A, signal.SIGHUP)
        federation.wait_until(
            lambda _: log_count(node, "site-b has another address") > 0, DEADLINE_S
        )
        assert log_count(node, "takes effect after a restart: node.yaml: device") == 1
        assert federation.status()[A] is not None


def test_an_invalid_file_changes_nothing_and_is_reported_once(lay_out_sites: LayOut) -> None:
    node, other = lay_out_sites(2, rounds=50)
    peers = node.directory / "peers.yaml"
    sound = peers.read_bytes()
    complaint = "the settings stay as they are: peers.yaml"
    with Federation([node]) as federation:
        federation.wait_until(lambda s: s[A] is not None, DEADLINE_S)
        for broken in (b"", sound[: len(sound) // 2], b"peers: []\nversion: 1\nfederation: demo\n"):
            before = log_count(node, complaint)
            peers.write_bytes(broken)
            federation.wait_until(
                lambda _, before=before: log_count(node, complaint) > before, DEADLINE_S
            )
            # A few more polls of the same file.
            until = time.monotonic() + 4 * POLL_S
            federation.wait_until(lambda _, until=until: time.monotonic() > until, DEADLINE_S)
            assert log_count(node, complaint) == before + 1
            assert announce(node, keys_of(node).certificate, keys_of(other))
        assert log_count(node, "settings changed") == 0
        peers.write_bytes(sound)
        remove_peer(peers, B)
        federation.wait_until(lambda _: log_count(node, "site-b is removed") > 0, DEADLINE_S)
        assert log_count(node, "it will not start again: 1 site cannot run a federation") == 1
        with pytest.raises(PeerError):
            announce(node, keys_of(node).certificate, keys_of(other))
        # It waits, reports it, and continues as soon as it has a peer again.
        federation.wait_until(
            lambda s: s[A] is not None and "too few sites are left" in s[A]["waiting"], DEADLINE_S
        )
        peers.write_bytes(sound)
        federation.wait_until(lambda _: log_count(node, "site-b has joined") > 0, DEADLINE_S)
        assert announce(node, keys_of(node).certificate, keys_of(other))
