"""Equivocation, membership changes and operator commands, with real nodes.

The test plays the equivocating site, with the keys of a site that is not running.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import yaml

from lightyear_node.identity.invite import Invite
from lightyear_node.lab.federation import Federation, SiteHome, Statuses
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.tools.peers_file import add_peers, remove_peer
from lightyear_node.transport import messages
from lightyear_node.transport.channel import DirectChannel
from lightyear_node.transport.client import PeerClient
from lightyear_node.types import Announcement, Digest, Generation, Manifest, PeerName, Round, Update
from tests.byzantine.member import PACKAGE
from tests.federation.test_reload import at_round, command, keys_of, log_count
from tests.support.site_queries import (
    DEADLINE_S,
    QUICK,
    A,
    B,
    C,
    LayOut,
    Records,
    check_histories,
    durable_values,
    finished,
    metrics_of,
)

D = PeerName("site-d")
ENDLESS = 500


class Played:
    """A site that the test plays with the site's keys."""

    def __init__(self, home: SiteHome) -> None:
        self.keys = keys_of(home)

    def announces(self, to: SiteHome, round: int, face: str) -> None:
        """Announce an update of this round to a node, with one of several contents."""
        update = Update(self.keys.name, Generation(9), Round(round), Digest(face * 64))
        # Copies the node's own manifest where it must be equal.
        own = durable_values(to)["manifest"]["manifest"]
        manifest = Manifest(
            own["federation"], update, own["lamport"], own["schema"], own["raw_bytes"], 10
        )
        latest = self.keys.sign_manifest(manifest)

        async def call() -> None:
            assert to.address is not None
            line = DirectChannel(to.name, to.address, [keys_of(to).certificate], self.keys)
            client = PeerClient(to.name, line)
            try:
                await client.announce(Announcement(1, Round(0), "collecting", latest))
            finally:
                await client.close()

        asyncio.run(call())

    def is_refused(self, by: SiteHome) -> str:
        """Return the reason why a node refuses to serve its newest update."""

        async def call() -> str:
            node = keys_of(by)
            credentials = grpc.ssl_channel_credentials(
                node.certificate.pem, self.keys.tls_key_pem, self.keys.certificate.pem
            )
            options = (("grpc.ssl_target_name_override", by.name), ("grpc.enable_http_proxy", 0))
            digest = Digest(durable_values(by)["manifest"]["manifest"]["update"]["digest"])
            request = messages.fetch_to(digest, 0, False).SerializeToString()
            async with grpc.aio.secure_channel(by.address, credentials, options=options) as channel:
                call = channel.unary_stream(PACKAGE + "Fetch")(request, timeout=20)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in call:
                        return "nothing"
                return str(await call.details()).partition(":")[0]

        return asyncio.run(call())


def quarantines(*names: PeerName) -> Callable[[Statuses], bool]:
    def reached(statuses: Statuses) -> bool:
        found = [statuses[name] for name in names]
        return all(status is not None and status["quarantined"] == [C] for status in found)

    return reached


def state_of(statuses: Statuses, name: PeerName) -> dict[str, Any]:
    status = statuses[name]
    assert status is not None
    return status


def test_a_site_that_equivocates_is_quarantined_by_all(
    lay_out_sites: LayOut, records: Records
) -> None:
    homes = lay_out_sites(3, rounds=ENDLESS)
    a, b, c = homes
    liar = Played(c)
    with Federation(homes[:2]) as federation:
        federation.wait_until(at_round(A, 1), DEADLINE_S)
        # In the others' round: with faulty_max 0 a single site can advance the round.
        round = 1
        liar.announces(a, round, "1")
        assert state_of(federation.status(), A)["quarantined"] == []
        liar.announces(b, round, "2")
        # Neither has seen both updates: gossip reveals the conflict.
        federation.wait_until(quarantines(A, B), DEADLINE_S)
        for home in (a, b):
            assert metrics_of(home)['lightyear_peer_quarantined{peer="site-c"}'] == 1
            [evidence] = [one for one in records(home) if one.kind == "evidence"]
            updates = [evidence.body[side]["manifest"]["update"] for side in ("first", "second")]
            assert {one["digest"] for one in updates} == {"1" * 64, "2" * 64}
            assert {(s["peer"], s["round"], s["generation"]) for s in updates} == {(C, round, 9)}

        # The quarantine survives a restart; only an operator lifts it.
        federation.kill(A)
        federation.wait_for_exit(A)
        federation.start(A)
        reached = state_of(federation.status(), B)["round"] + 2
        federation.wait_until(at_round(A, reached), DEADLINE_S)
        assert quarantines(A, B)(federation.status())
        last = {one["peer"]: one for one in federation.rounds(A)[-1]["verdicts"]}
        assert (last[C]["accepted"], last[C]["reason"]) == (False, "quarantined")
        assert liar.is_refused(by=a) == "quarantined"

        assert "in quarantine" in command(a, "peers", "list")
        assert f"peers unquarantine {C}` ends it" in command(a, "peers", "show", C)
        assert f"{C}: quarantined" in command(a, "health")
        assert "out of quarantine" in command(a, "peers", "unquarantine", C)
        federation.wait_until(lambda s: state_of(s, A)["quarantined"] == [], DEADLINE_S)
        assert "not in quarantine" in command(a, "peers", "unquarantine", C)
        [given] = [one.body for one in records(a) if one.kind == "operator"]
        assert (given["command"], given["peer"], bool(given["user"])) == ("unquarantine", C, True)
        assert state_of(federation.status(), B)["quarantined"] == [C], (
            "each site decides for itself"
        )
        reached = state_of(federation.status(), A)["round"] + 2
        federation.wait_until(at_round(A, reached), DEADLINE_S)
        # The others still send the old evidence, which is ignored; new evidence counts.
        assert state_of(federation.status(), A)["quarantined"] == []
        for face in ("3", "4"):
            liar.announces(a, reached, face)
        federation.wait_until(quarantines(A, B), DEADLINE_S)
        assert [one.kind for one in records(a)].count("evidence") == 2
    check_histories(homes[:2], records)


def test_an_operator_pauses_blocks_and_stops(lay_out_sites: LayOut, records: Records) -> None:
    homes = lay_out_sites(3, rounds=ENDLESS)
    a, _, c = homes
    with Federation(homes) as federation:
        federation.wait_until(at_round(C, 1), DEADLINE_S)
        assert "pausing" in command(a, "pause")
        federation.wait_until(lambda s: state_of(s, A)["phase"] == "paused", DEADLINE_S)
        paused_at = state_of(federation.status(), A)["round"]
        # The others continue without it, also after its restart.
        federation.wait_until(at_round(B, paused_at + 3), DEADLINE_S)
        federation.kill(A)
        federation.wait_for_exit(A)
        federation.start(A)
        federation.wait_until(lambda s: s[A] is not None and s[A]["phase"] == "paused", DEADLINE_S)
        reached = state_of(federation.status(), B)["round"]
        federation.wait_until(at_round(B, reached + 2), DEADLINE_S)
        assert state_of(federation.status(), A)["phase"] == "paused"
        assert metrics_of(a)["lightyear_paused"] == 1

        assert "going on" in command(a, "resume")
        federation.wait_until(at_round(A, reached + 3), DEADLINE_S)

        assert "is blocked" in command(a, "peers", "block", C)
        reached = state_of(federation.status(), A)["round"] + 2
        federation.wait_until(at_round(A, reached), DEADLINE_S)
        last = {one["peer"]: one for one in federation.rounds(A)[-1]["verdicts"]}
        assert (last[C]["accepted"], last[C]["reason"]) == (False, "blocked")
        assert Played(c).is_refused(by=a) == "blocked"
        assert "no longer blocked" in command(a, "peers", "unblock", C)
        federation.wait_until(
            lambda _: any(
                one["peer"] == C and one["accepted"] for one in federation.rounds(A)[-1]["verdicts"]
            ),
            DEADLINE_S,
        )

        federation.kill(
            A, signal.SIGCONT
        )  # no effect on the node; from now on its exit is expected
        assert "stopping when the round" in command(a, "stop")
        assert federation.wait_for_exit(A) == 0
        history = records(a)
        steps = [one.kind for one in history if one.kind in ("seal", "decision", "commit")]
        assert steps[-1] == "commit", "the round under way was completed"
        commands = [one.body["command"] for one in history if one.kind == "operator"]
        assert commands == ["pause", "resume", "block", "unblock", "stop"]
        assert all(one.body["user"] for one in history if one.kind == "operator")
    check_histories(homes, records)


def test_sites_join_and_leave_while_rounds_run(lay_out_sites: LayOut, records: Records) -> None:
    homes = lay_out_sites(4, rounds=ENDLESS, barrier=QUICK)
    a, b, c, d = homes
    for home in (a, b, c):
        remove_peer(home.directory / "peers.yaml", D)
    joining = [Invite(D, d.address, keys_of(d).certificate)]
    with Federation(homes[:3]) as federation:
        pids = [federation.pid(home.name) for home in homes[:3]]
        federation.wait_until(at_round(A, 1), DEADLINE_S)
        add_peers(a.directory / "peers.yaml", joining, None)
        # Until all have the same file, both sides report the difference and continue.
        federation.wait_until(
            lambda _: (
                log_count(a, "site-d is only in ours")
                and log_count(b, "site-d is only in its copy")
            ),
            DEADLINE_S,
        )
        federation.wait_until(
            at_round(B, state_of(federation.status(), A)["round"] + 2), DEADLINE_S
        )
        for home in (b, c):
            add_peers(home.directory / "peers.yaml", joining, None)
        with Federation([d]) as fourth:
            first = fourth.wait_until(at_round(D, 1), DEADLINE_S)
            assert state_of(first, D)["round"] >= 1
            federation.wait_until(lambda _: accepted(federation, A, D), DEADLINE_S)
            fourth.wait_until(lambda _: accepted(fourth, D, A), DEADLINE_S)
            for home in (a, b, d):
                remove_peer(home.directory / "peers.yaml", C)
            reached = state_of(federation.status(), A)["round"] + 3
            federation.wait_until(at_round(A, reached), DEADLINE_S)
            fourth.wait_until(at_round(D, reached), DEADLINE_S)
            assert {one["peer"] for one in federation.rounds(A)[-1]["verdicts"]} == {B, D}
            assert pids == [federation.pid(home.name) for home in homes[:3]]
        changes = [one.body for one in records(a) if one.kind == "settings"]
        assert [body.get("joined") for body in changes if "joined" in body] == [[D]]
        assert [body.get("removed") for body in changes if "removed" in body] == [[C]]
    check_histories(homes, records)


def accepted(federation: Federation, by: PeerName, peer: PeerName) -> bool:
    rounds = federation.rounds(by)
    return bool(rounds) and any(
        one["peer"] == peer and one["accepted"] for one in rounds[-1]["verdicts"]
    )


def test_a_rejected_site_learns_the_verdict_only_if_verdicts_are_shared(
    lay_out_sites: LayOut, records: Records
) -> None:
    homes = lay_out_sites(3, rounds=4, malfunctions={C: MalfunctionConfig(kind="sfa")})
    a, _, c = homes
    settings = yaml.safe_load((a.directory / "node.yaml").read_text())
    (a.directory / "node.yaml").write_text(yaml.safe_dump({**settings, "share_verdicts": True}))
    with Federation(homes) as federation:
        statuses = federation.wait_until(finished(A, B, C), DEADLINE_S)
        federation.wait_until(lambda _: log_count(c, "site-a refuses our update") > 0, DEADLINE_S)
        shown = {peer["name"]: peer["opinion"] for peer in state_of(statuses, B)["peers"]}
        assert shown[C] == ""
    opinions = [one.body for one in records(c) if one.kind == "told"]
    assert {one["peer"] for one in opinions} == {A}
    assert {one["opinion"]["reason"] for one in opinions} == {"too_far"}
    assert "score" not in str(opinions)
    assert not [one for one in records(a) if one.kind == "told"]
    assert log_count(c, "site-b refuses") == 0
