"""What only the whole protocol gives: two stories are found out, members and operators come and go.

Real nodes; whoever lies is played by hand, with the keys of a site that is not running.
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
from asking import (
    DEADLINE_S,
    QUICK,
    A,
    B,
    C,
    LayOut,
    check_histories,
    finished,
    kept_by,
    metrics_of,
)
from member import PACKAGE
from test_reload import at_round, command, keys_of, said

from lightyear_node.config.site import Malfunction
from lightyear_node.joining import Joined
from lightyear_node.journal import Record
from lightyear_node.lab.federation import Federation, SiteHome, Statuses
from lightyear_node.peers_file import add_peers, remove_peer
from lightyear_node.records import (
    Announcement,
    Digest,
    Generation,
    Manifest,
    PeerName,
    Round,
    Update,
)
from lightyear_node.transport import messages
from lightyear_node.transport.client import PeerClient
from lightyear_node.transport.lines import Direct

D = PeerName("site-d")
ENDLESS = 500
Records = Callable[[SiteHome], list[Record]]


class Played:
    """A site that is not running, or not only, whose keys the test has."""

    def __init__(self, home: SiteHome) -> None:
        self.keys = keys_of(home)

    def announces(self, to: SiteHome, round: int, face: str) -> None:
        """Tell a node of an update of this round, with one of several contents."""
        update = Update(self.keys.name, Generation(9), Round(round), Digest(face * 64))
        # Of the node's own, all that must be the same in ours.
        own = kept_by(to)["manifest"]["manifest"]
        manifest = Manifest(
            own["federation"], update, own["lamport"], own["schema"], own["raw_bytes"], 10
        )
        latest = self.keys.sign_manifest(manifest)

        async def call() -> None:
            assert to.address is not None
            line = Direct(to.name, to.address, [keys_of(to).certificate], self.keys)
            client = PeerClient(to.name, line)
            try:
                await client.announce(Announcement(1, Round(0), "collecting", latest))
            finally:
                await client.close()

        asyncio.run(call())

    def is_refused(self, by: SiteHome) -> str:
        """Why a node does not give us its newest update."""

        async def call() -> str:
            node = keys_of(by)
            credentials = grpc.ssl_channel_credentials(
                node.certificate.pem, self.keys.tls_key_pem, self.keys.certificate.pem
            )
            options = (("grpc.ssl_target_name_override", by.name), ("grpc.enable_http_proxy", 0))
            digest = Digest(kept_by(by)["manifest"]["manifest"]["update"]["digest"])
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


def test_a_site_that_tells_two_stories_is_found_out_by_all(
    lay_out_sites: LayOut, records: Records
) -> None:
    homes = lay_out_sites(3, rounds=ENDLESS)
    a, b, c = homes
    liar = Played(c)
    with Federation(homes[:2]) as federation:
        federation.wait_until(at_round(A, 1), DEADLINE_S)
        # Where the others are: with faulty_max 0 one site is believed about a later round.
        round = 1
        liar.announces(a, round, "1")
        assert state_of(federation.status(), A)["quarantined"] == []
        liar.announces(b, round, "2")
        # Neither has seen both: they find out by telling each other.
        federation.wait_until(quarantines(A, B), DEADLINE_S)
        for home in (a, b):
            assert metrics_of(home)['lightyear_peer_quarantined{peer="site-c"}'] == 1
            [evidence] = [one for one in records(home) if one.kind == "evidence"]
            stories = [evidence.body[side]["manifest"]["update"] for side in ("first", "second")]
            assert {story["digest"] for story in stories} == {"1" * 64, "2" * 64}
            assert {(s["peer"], s["round"], s["generation"]) for s in stories} == {(C, round, 9)}

        # It outlasts a restart, and only an operator lifts it.
        federation.kill(A)
        federation.wait_for_exit(A)
        federation.start(A)
        reached = state_of(federation.status(), B)["round"] + 2
        federation.wait_until(at_round(A, reached), DEADLINE_S)
        assert quarantines(A, B)(federation.status())
        last = {one["peer"]: one for one in federation.rounds(A)[-1]["verdicts"]}
        assert (last[C]["accepted"], last[C]["reason"]) == (False, "quarantined")
        assert liar.is_refused(by=a) == "quarantined"

        assert "out of quarantine" in command(a, "peers", "unquarantine", C)
        federation.wait_until(lambda s: state_of(s, A)["quarantined"] == [], DEADLINE_S)
        reached = state_of(federation.status(), A)["round"] + 2
        federation.wait_until(at_round(A, reached), DEADLINE_S)
        # The others still tell of it, and it is not counted again; a new story is.
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
        # The others go on without it, also after it was started again.
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

        federation.kill(A, signal.SIGCONT)  # means nothing to it, and that its end is no failure
        assert "stopping when the round" in command(a, "stop")
        assert federation.wait_for_exit(A) == 0
        history = records(a)
        assert history[-1].kind == "commit", "the round under way was completed"
        commands = [one.body["command"] for one in history if one.kind == "operator"]
        assert commands == ["pause", "resume", "block", "unblock", "stop"]
        assert all(one.body["user"] for one in history if one.kind == "operator")
    check_histories(homes, records)


def test_sites_join_and_leave_while_rounds_run(lay_out_sites: LayOut, records: Records) -> None:
    homes = lay_out_sites(4, rounds=ENDLESS, barrier=QUICK)
    a, b, c, d = homes
    for home in (a, b, c):
        remove_peer(home.directory / "peers.yaml", D)
    joining = [Joined(D, d.address, keys_of(d).certificate)]
    with Federation(homes[:3]) as federation:
        pids = [federation.pid(home.name) for home in homes[:3]]
        federation.wait_until(at_round(A, 1), DEADLINE_S)
        add_peers(a.directory / "peers.yaml", joining, None)
        # Until the others have the same file, both sides say what differs, and go on.
        federation.wait_until(
            lambda _: said(a, "site-d is only in ours") and said(b, "site-d is only in its copy"),
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


def test_a_refused_site_is_told_only_where_verdicts_are_shared(
    lay_out_sites: LayOut, records: Records
) -> None:
    homes = lay_out_sites(3, rounds=4, malfunctions={C: Malfunction(kind="sfa")})
    a, _, c = homes
    settings = yaml.safe_load((a.directory / "node.yaml").read_text())
    (a.directory / "node.yaml").write_text(yaml.safe_dump({**settings, "share_verdicts": True}))
    with Federation(homes) as federation:
        statuses = federation.wait_until(finished(A, B, C), DEADLINE_S)
        federation.wait_until(lambda _: said(c, "site-a refuses our update") > 0, DEADLINE_S)
        shown = {peer["name"]: peer["opinion"] for peer in state_of(statuses, B)["peers"]}
        assert shown[C] == ""
    told = [one.body for one in records(c) if one.kind == "told"]
    assert {one["peer"] for one in told} == {A}
    assert {one["opinion"]["reason"] for one in told} == {"too_far"}
    assert "score" not in str(told)
    assert not [one for one in records(a) if one.kind == "told"]
    assert said(c, "site-b refuses") == 0
