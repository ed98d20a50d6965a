"""`check` and `peers ping` against every kind of server at a peer's address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.config.federation import load_federation_config
from lightyear_node.identity.invite import Invite
from lightyear_node.identity.keys import BACKDATED, LIFETIME, Identity, make_identity
from lightyear_node.lab.federation import START, Federation, SiteHome, package_environment
from lightyear_node.storage.hash_chain import Record
from lightyear_node.tools.peers_file import peer_of, write_peers_file
from lightyear_node.transport.limits import HANDSHAKE_S
from lightyear_node.types import PeerName
from tests.support import impostors
from tests.support.needs import need_tool
from tests.support.site_queries import DEADLINE_S, PATIENT, B, C, LayOut, change_yaml, metrics_of

D = PeerName("site-d")
NOW = datetime.now(UTC)
HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n"
ALL_LINKS = 12

OTHER_MODEL = """
from torch import nn
from lightyear_node.lab.tasks import digits

def build(**arguments):
    task = digits.build(**arguments)
    task.model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 10))
    return task
"""


async def asked(home: SiteHome, *command: str, code: int) -> dict[str, Any]:
    """Run one of the two commands as an operator would; return its data."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lightyear_node", *command, "--format", "json"),
        cwd=home.directory,
        env=package_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(DEADLINE_S):
        output, errors = await process.communicate()
    assert process.returncode == code, (output, errors.decode())
    assert not errors.decode()
    data: dict[str, Any] = json.loads(output)["data"]
    assert data["ok"] == (code == 0)
    return data


async def ping(
    home: SiteHome, name: PeerName = B, *, code: int, timeout_s: int = 20
) -> dict[str, Any]:
    data = await asked(home, "peers", "ping", name, "--timeout", str(timeout_s), code=code)
    [peer] = data["peers"]
    assert peer["peer"] == name
    return dict(peer)


def marks(peer: dict[str, Any]) -> dict[str, str]:
    return {link["name"]: link["mark"] for link in peer["links"]}


def broken_at(peer: dict[str, Any], name: str) -> dict[str, str]:
    """Check that this step fails, the steps before pass, and none after is shown."""
    names = [link["name"] for link in peer["links"]]
    where = names.index(name)
    by_name = marks(peer)
    assert len(names) == ALL_LINKS
    assert all(by_name[one] in ("holds", "differs") for one in names[:where]), by_name
    assert by_name[name] == "broken"
    assert all(by_name[one] == "not_reached" for one in names[where + 1 :]), by_name
    link: dict[str, str] = peer["links"][where]
    assert link["advice"]
    return link


def keys_of(home: SiteHome) -> Identity:
    return Identity.load(home.directory / "keys")


def put_into_peers(home: SiteHome, identity: Identity, address: str) -> None:
    """Pin this identity at this address in the home's peers.yaml, in place of its namesake."""
    path = home.directory / "peers.yaml"
    agreement = load_federation_config(path)
    peer = peer_of(Invite(identity.name, address, identity.certificate))
    others = [one for one in agreement.peers if one.name != peer.name]
    write_peers_file(path, agreement.model_copy(update={"peers": (*others, peer)}))


@contextlib.asynccontextmanager
async def nothing() -> AsyncIterator[None]:
    yield


@contextlib.asynccontextmanager
async def firewall(address: str) -> AsyncIterator[None]:
    with impostors.dropping(address):
        yield


Stage = Callable[[SiteHome, SiteHome], AbstractAsyncContextManager[None]]


@pytest.mark.parametrize(
    ("stage", "link", "words"),
    [
        pytest.param(lambda a, b: nothing(), "tcp", "refused", id="closed port"),
        pytest.param(lambda a, b: firewall(b.address), "tcp", "firewall", id="firewall"),
        pytest.param(
            lambda a, b: impostors.plain(b.address, b"", HTTP),
            *("tls", "does not speak TLS"),
            id="web server",
        ),
        pytest.param(
            lambda a, b: impostors.plain(b.address, b"SSH-2.0-OpenSSH_9\r\n", b""),
            *("tls", "does not speak TLS"),
            id="SSH",
        ),
        pytest.param(
            lambda a, b: impostors.cutting(b.address), "tls", "closes the connection", id="cut"
        ),
        pytest.param(
            lambda a, b: impostors.plain(b.address, b"", b""),
            *("tls", "sends nothing"),
            id="silence",
        ),
        pytest.param(
            lambda a, b: impostors.node(b.address, make_identity("site-b", NOW), keys_of(a)),
            *("pin", "renewed its keys"),
            id="renewed keys",
        ),
        pytest.param(
            lambda a, b: impostors.node(b.address, make_identity("site-x", NOW), keys_of(a)),
            *("pin", "is the node of site-x"),
            id="another site",
        ),
        pytest.param(
            lambda a, b: impostors.node(b.address, keys_of(b), make_identity("site-a", NOW)),
            *("accepted", "closes the connection when it sees our certificate"),
            id="does not know us",
        ),
    ],
)
def test_the_servers_at_an_address_are_distinguished(
    lay_out_sites: LayOut, stage: Stage, link: str, words: str
) -> None:
    a, b = lay_out_sites(2)

    async def scenario() -> None:
        async with stage(a, b):
            assert words in broken_at(await ping(a, code=3, timeout_s=4), link)["about"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("made", "words"),
    [(NOW - LIFETIME - BACKDATED, "expired on"), (NOW + timedelta(days=5), "is valid from")],
)
def test_a_pinned_certificate_outside_its_validity_is_reported(
    lay_out_sites: LayOut, made: datetime, words: str
) -> None:
    a, b = lay_out_sites(2)
    theirs = make_identity("site-b", made)
    put_into_peers(a, theirs, b.address)

    async def scenario() -> None:
        async with impostors.node(b.address, theirs, keys_of(a)):
            pin = broken_at(await ping(a, code=3), "pin")
            assert words in pin["about"]
            assert "clock" in pin["advice"]

    asyncio.run(scenario())


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2])
def test_a_tls_inspecting_proxy_is_reported(
    lay_out_sites: LayOut, tmp_path: Path, newest: ssl.TLSVersion
) -> None:
    a, b, c = lay_out_sites(3)
    proxied, real = b.address, c.address

    async def scenario() -> None:
        async with (
            impostors.node(real, keys_of(b), keys_of(a)),
            impostors.inspecting_proxy(proxied, real, tmp_path, newest),
        ):
            pin = broken_at(await ping(a, code=3), "pin")
            assert f"issued by CN={impostors.AUTHORITY}" in pin["about"]
            assert f"exempt {proxied}" in pin["advice"]
            # Without the proxy the same site passes.
            put_into_peers(a, make_identity("site-c", NOW), "127.0.0.1:1")
            put_into_peers(a, keys_of(b), real)
            assert marks(await ping(a, code=0))["answer"] == "holds"

    asyncio.run(scenario())


def test_a_name_that_does_not_resolve_is_reported(lay_out_sites: LayOut) -> None:
    a, b = lay_out_sites(2)
    put_into_peers(a, keys_of(b), "no-such-host.invalid:7443")
    dns = broken_at(asyncio.run(ping(a, code=3)), "dns")
    assert "no-such-host.invalid" in dns["about"]


def test_differences_between_sites_are_reported(lay_out_sites: LayOut) -> None:
    homes = lay_out_sites(4, rounds=50)
    a, b, c, d = homes
    change_yaml(b.directory / "peers.yaml", federation="another")
    (c.directory / "other.py").write_text(OTHER_MODEL)
    change_yaml(c.directory / "node.yaml", task={"entry": "other:build"})
    change_yaml(d.directory / "peers.yaml", rounds=51, seed=8)
    with Federation([b, c, d]) as federation:
        federation.wait_until(lambda s: all(s.values()), DEADLINE_S)
        data = asyncio.run(asked(a, "check", code=3))
        # In a folder where no node has run, the model is unknown, and no file is created.
        assert not a.state_dir.exists()
        assert marks(asyncio.run(ping(a, D, code=0)))["schema"] == "not_known"
        assert not a.state_dir.exists()
    peers = {peer["peer"]: peer for peer in data["peers"]}
    assert "'another', we to 'demo'" in broken_at(peers[B], "federation")["about"]
    assert "other tensors" in broken_at(peers[C], "schema")["about"]
    assert marks(peers[C])["agreement"] == "holds"
    links = {link["name"]: link for link in peers[D]["links"]}
    differing = [name for name, link in links.items() if link["mark"] != "holds"]
    assert differing == ["agreement", "initial_model"]
    ours, theirs = (load_federation_config(one.directory / "peers.yaml").digest() for one in (a, d))
    assert ours[:12] in links["agreement"]["about"]
    assert theirs[:12] in links["agreement"]["about"]


def test_a_check_between_two_running_nodes_passes_and_does_not_disturb_them(
    lay_out_sites: LayOut, records: Callable[[SiteHome], list[Record]]
) -> None:
    homes = lay_out_sites(2, rounds=500, barrier=PATIENT)
    with Federation(homes) as federation:

        def beyond(round: int) -> None:
            federation.wait_until(
                lambda s: all(status and status["round"] > round for status in s.values()),
                DEADLINE_S,
            )

        beyond(0)
        data = asyncio.run(asked(homes[0], "check", code=0))
        reached = max(status["round"] for status in federation.status().values() if status)
        pinged = asyncio.run(ping(homes[0], code=0))
        beyond(reached + 1)
    assert set(marks(data["peers"][0]).values()) == {"holds"}
    # The second command builds no model: it reads the schema from the running node's journal.
    assert set(marks(pinged).values()) == {"holds"}
    checks = {check["name"]: check for check in data["checks"]}
    assert "broken" not in {check["mark"] for check in checks.values()}
    assert "our own running node" in checks["listen"]["about"]
    for home in homes:
        history = records(home)
        verdicts = [one.body["verdicts"] for one in history if one.kind == "decision"]
        # The connection never broke, and no site restarted.  On a busy machine the other may be
        # ahead, so that its newest update has been used already.
        assert len(verdicts) > reached
        missing = [one for judged in verdicts for one in judged if one["digest"] is None]
        assert {one["reason"] for one in missing} <= {"stale_round"}
        assert sum(record.kind == "start" for record in history) == 1


def test_a_probe_leaves_no_trace(
    lay_out_sites: LayOut, records: Callable[[SiteHome], list[Record]]
) -> None:
    """Not even from a site whose real calls would be refused."""
    a, b = lay_out_sites(2, rounds=50)

    def traces() -> tuple[object, ...]:
        known = metrics_of(b).items()
        # Free disk space changes with other activity on this machine.
        # As text: unknown values are NaN, which equals nothing.
        metrics = {
            k: str(v) for k, v in known if k.startswith("lightyear_") and "disk_free" not in k
        }
        log = [line for line in b.log.read_text().splitlines() if "waiting for" not in line]
        return metrics, log, records(b), (b.state_dir / "journal.db-wal").read_bytes()

    with Federation([b]) as federation:

        def settled(statuses: Any) -> bool:
            status = statuses[B]
            if status is None or status["phase"] != "observing":
                return False
            return bool(status["peers"][0]["state"] == "unreachable")

        federation.wait_until(settled, DEADLINE_S)
        change_yaml(a.directory / "peers.yaml", federation="another")
        before = traces()
        broken_at(asyncio.run(ping(a, code=3)), "federation")
        assert traces() == before
        # An unauthenticated connection is counted with a delay; so would the probe's be by then.
        handshakes = 'lightyear_authentication_failures_total{reason="handshake"}'
        host, _, port = b.address.rpartition(":")
        with socket.create_connection((host, int(port))):
            due = time.monotonic() + HANDSHAKE_S + 1
            federation.wait_until(
                lambda s: metrics_of(b)[handshakes] > 0 and time.monotonic() > due, DEADLINE_S
            )
        assert metrics_of(b)[handshakes] == 1


@pytest.mark.parametrize(
    ("shift", "words"), [("+1d", "1 d 0 h ahead of ours"), ("-20h", "20 h 0 min behind ours")]
)
def test_a_wrong_clock_is_a_warning(
    lay_out_sites: LayOut, monkeypatch: pytest.MonkeyPatch, shift: str, words: str
) -> None:
    need_tool("faketime")
    a, b = lay_out_sites(2, rounds=50)
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    with Federation([b], ["faketime", "-f", shift, *START]) as federation:
        federation.wait_until(lambda s: s[B] is not None, DEADLINE_S)
        peer = asyncio.run(ping(a, code=0))
    clock = peer["links"][-1]
    assert clock["mark"] == "differs"
    assert clock["about"] == f"their clock is {words}"
    assert "NTP" in clock["advice"]


def test_the_table_shows_advice(lay_out_sites: LayOut) -> None:
    a, _ = lay_out_sites(2)

    async def scenario() -> str:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lightyear_node", "peers", "ping"),
            cwd=a.directory,
            env=package_environment(),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        assert process.returncode == 3
        return output.decode()

    head, peer, about, advice = asyncio.run(scenario()).splitlines()
    assert head.split()[:3] == ["DNS", "TCP", "TLS"]
    assert peer.split() == ["✗", "site-b", "✓", "✗", *["–"] * (ALL_LINKS - 2)]
    assert "✗ TCP: nothing listens" in about
    assert "what to do: ask site-b" in advice
