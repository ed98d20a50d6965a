"""A member with a valid certificate misbehaves in every way: refused and counted; rounds continue.

All tests share a federation: site-b misbehaves, the other three are real nodes, and of four sites
one may be faulty.
"""

from __future__ import annotations

import ast
import asyncio
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lightyear_node
import tests.byzantine.calls
import tests.byzantine.harmful_messages  # noqa: F401 - both add their behaviours
from lightyear_node.config.federation import BarrierConfig
from lightyear_node.lab.federation import Federation, SiteHome, package_environment
from lightyear_node.protocol.record_quota import PER_ROUND, STOCK
from lightyear_node.storage.hash_chain import Record
from lightyear_node.types import PeerName
from tests.byzantine.behaviours import BEHAVIOURS, marker_of, pickled
from tests.byzantine.member import Member
from tests.support.attacked_node import AttackedNode
from tests.support.paths import ROOT
from tests.support.site_queries import DEADLINE_S, A, B, C, LayOut

ONE_MAY_LIE = BarrierConfig(
    min_peers=2, faulty_max=1, heartbeat=0.5, grace=3.0, suspect=5.0, observe=2.0
)

NOT_THE_UPDATE = {
    "bomb": "too_large",
    "window-bomb": "too_large",
    "tebibyte": "too_large",
    "oversized-chunk": "too_large",
    "oversized-piece": "too_large",
    "one-chunk-too-many": "too_large",
    "longer-list": "too_large",
    "skippable-frame": "malformed",
    "concatenated-frames": "malformed",
    "garbage-tail": "malformed",
    "truncated-frame": "malformed",
    "unsolicited-delta": "malformed",
    "long-list": "malformed",
    "huge-list": "malformed",
    "no-piece": "malformed",
    "malformed-piece": "malformed",
    "pickle-as-frame": "malformed",
    "flipped-byte": "checksum",
    "another-list": "checksum",
    "empty-list": "checksum",
    "short-list": "checksum",
    "other-header": "checksum",
    "pickle-as-file": "checksum",
    "truncated-stream": "truncated",
    "fresh-digests": "truncated",
}
"""Fetched, then refused for this reason."""
NOT_SOUND = {
    "other-schema": "schema_mismatch",
    "short-update": "schema_mismatch",
    "huge-update": "too_large",
    "beyond-all-rounds": "malformed",
    "other-federation": "federation",
    "forged-signature": "signature",
    "anothers-key": "signature",
    "anothers-name": "identity",
    "echo": "echo",
    "malformed-reply": "malformed",
    "large-reply": "malformed",
    "oversized-reply": "too_large",
}
"""Refused before a byte is fetched."""
NOT_TO_BE_MERGED = {
    "nan-weights": "nonfinite",
    "huge-scale": "too_far",
    "pickle-as-tensors": None,
    "far-future": "nonfinite",
}
"""Valid files that the rule rejects; which check fails first depends on the rule.
Each counts for so many rounds that the node wants no other, so each has its own federation."""
NOT_TO_BE_ASKED = {
    "large-announcement": "malformed",
    "oversized-announcement": "malformed",
    "malformed-announcement": "malformed",
    "malformed-greeting": "malformed",
    "drip-request": "malformed",
    "announce-flood": "too_often",
    "fetch-flood": "too_many_fetches",
    "reverse-stream-flood": "too_many_calls",
    "malformed-flood": "cooling_down",
}
"""Calls that the node refuses."""
WORDS = {"old-evidence", "small-jumps", "stamp-beyond-reach", "clause-flood", "ever-later"}
"""Well formed and signed: accepted, but without any effect."""
REPLAY = "replayed-update"
"""Not counted: updates older than the newest are ignored."""


@pytest.fixture
def attacked(lay_out_sites: LayOut) -> Iterator[AttackedNode]:
    homes = lay_out_sites(4, rounds=100_000, barrier=ONE_MAY_LIE)
    attacker = homes.pop(1)
    with Federation(homes) as federation:
        federation.wait_until(lambda s: s[A] is not None and s[A]["round"] >= 1, DEADLINE_S)
        yield AttackedNode(federation, homes[0], attacker)


async def goes_up(attacked: AttackedNode, series: str, since: float, **labels: str | None) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await asyncio.to_thread(attacked.count, series, **labels) <= since:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def test_invalid_data_from_a_member_is_refused_with_its_reason(attacked: AttackedNode) -> None:
    """Every misbehaviour of a member, one after the other, against one node."""
    tables: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("transfer_errors", NOT_THE_UPDATE, {"peer": B}),
        ("peer_refusals", NOT_SOUND, {"peer": B}),
        ("peer_calls_denied", NOT_TO_BE_ASKED, {"peer": B}),
    ]
    elsewhere = {*NOT_TO_BE_MERGED, *WORDS, REPLAY}
    assert {name for _, table, _ in tables for name in table} | elsewhere == {*BEHAVIOURS}

    async def misbehave() -> None:
        async with Member(attacked.attacker.directory, attacked.node.directory) as member:
            await asyncio.wait_for(member.meet(), DEADLINE_S)
            for series, table, labels in tables:
                for name, reason in table.items():
                    wanted = {**labels, "reason": reason}
                    before = attacked.count(series, **wanted)
                    await BEHAVIOURS[name](member)
                    try:
                        await goes_up(attacked, series, before, **wanted)
                    except TimeoutError:
                        pytest.fail(f"{name} was not counted in {series} as {reason}")

    asyncio.run(misbehave())
    assert attacked.round() < 10_000, "one Byzantine site must not advance the round"
    attacked.check_progress()
    assert not marker_of(attacked.node.directory).exists()


@pytest.mark.parametrize("name", NOT_TO_BE_MERGED)
def test_a_valid_update_of_a_bad_model_is_rejected_by_the_rule(
    attacked: AttackedNode, name: str
) -> None:
    async def misbehave() -> None:
        async with Member(attacked.attacker.directory, attacked.node.directory) as member:
            await asyncio.wait_for(member.meet(), DEADLINE_S)
            await BEHAVIOURS[name](member)
            wanted = {"peer": B, "verdict": "rejected", "reason": NOT_TO_BE_MERGED[name]}
            await goes_up(attacked, "peer_verdicts", 0, **wanted)

    asyncio.run(misbehave())
    assert attacked.round() < 10_000, "one Byzantine site must not advance the round"
    attacked.check_progress()


def accused_in(history: list[Record]) -> list[str]:
    return [one.body["peer"] for one in history if one.kind == "evidence"]


def is_about(peer: PeerName, noted: Record) -> bool:
    reported = [signed["manifest"]["update"]["peer"] for signed in noted.body["updates"]]
    return peer in reported


def test_messages_of_a_member_neither_stop_nor_split_the_others(
    attacked: AttackedNode, records: Callable[[SiteHome], list[Record]]
) -> None:
    """Whatever it sends, the others continue together, and all can be restarted."""
    stamps = [record.lamport for record in records(attacked.node)]

    async def misbehave() -> None:
        async with Member(attacked.attacker.directory, attacked.node.directory) as member:
            await asyncio.wait_for(member.meet(), DEADLINE_S)
            for name in sorted(WORDS, key=lambda name: name == "old-evidence"):
                await BEHAVIOURS[name](member)
            # Its evidence against itself is accepted and durable.
            async with asyncio.timeout(DEADLINE_S):
                while not accused_in(records(attacked.node)):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

    asyncio.run(misbehave())
    attacked.check_progress()
    history = records(attacked.node)
    assert accused_in(history) == [B]
    noted = [one for one in history if one.kind == "witness" and is_about(B, one)]
    assert len(noted) <= STOCK + PER_ROUND * len({one.round for one in history}) + 1
    assert max(one.lamport for one in history) < max(stamps) + 10_000, "no site's stamp has moved"
    for site in attacked.federation.homes:
        attacked.federation.kill(site)
        attacked.federation.wait_for_exit(site)
        attacked.federation.start(site)
    attacked.federation.wait_until(lambda s: s[A] is not None, DEADLINE_S)
    attacked.check_progress()


@pytest.mark.parametrize("name", ["empty-list", "short-list"])
def test_a_chunk_list_shorter_than_announced_does_not_block_judging(
    attacked: AttackedNode, name: str
) -> None:
    """Announced far ahead, so that an accepted file would be judged in every round."""

    async def misbehave() -> None:
        async with Member(attacked.attacker.directory, attacked.node.directory) as member:
            await asyncio.wait_for(member.meet(), DEADLINE_S)
            await BEHAVIOURS[name](member)
            async with asyncio.timeout(DEADLINE_S):
                while not member.fetched:  # noqa: ASYNC110 - the node asks when it likes
                    await asyncio.sleep(0.05)
            first = await asyncio.to_thread(attacked.round) + 2
            async with asyncio.timeout(DEADLINE_S):
                while await asyncio.to_thread(attacked.round) < first + 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            rounds = [entry for entry in attacked.federation.rounds(A) if entry["round"] >= first]
            verdicts = [verdict for entry in rounds for verdict in entry["verdicts"]]
            assert rounds
            assert "unscored" not in {verdict["reason"] for verdict in verdicts}
            assert all(v["accepted"] for v in verdicts if v["peer"] == C and v["digest"])

    asyncio.run(misbehave())
    assert attacked.count("transfer_errors", peer=B, reason="checksum") > 0
    attacked.check_progress()


def test_new_updates_at_every_heartbeat_do_not_fill_the_disk(attacked: AttackedNode) -> None:
    """Of incomplete updates, at most one partial file exists at any time."""
    updates = attacked.node.state_dir / "updates"

    async def misbehave() -> int:
        pieces: set[str] = set()
        async with Member(attacked.attacker.directory, attacked.node.directory) as member:
            await asyncio.wait_for(member.meet(), DEADLINE_S)
            await BEHAVIOURS["fresh-digests"](member)
            async with asyncio.timeout(DEADLINE_S):
                while len(set(member.fetched)) < 4:
                    asked = set(member.fetched)
                    here = {path.stem for path in updates.glob("*.part")} & asked
                    assert len(here) <= 1
                    pieces |= here
                    await asyncio.sleep(0.02)
        return len(pieces)

    assert asyncio.run(misbehave()) > 0, "the folder was sampled during the transfers"
    attacked.check_progress()


def test_an_update_that_was_announced_before_is_not_fetched_again(attacked: AttackedNode) -> None:
    async def misbehave() -> None:
        async with Member(attacked.attacker.directory, attacked.node.directory) as member:
            await asyncio.wait_for(member.meet(), DEADLINE_S)
            # Both so far ahead that the node would want either of them for many rounds.
            await BEHAVIOURS["garbage-tail"](member)
            await goes_up(attacked, "transfer_errors", 0, peer=B, reason="malformed")
            await BEHAVIOURS["nan-weights"](member)
            # The previous one was rejected, too, for another reason.
            wanted = {"peer": B, "verdict": "rejected", "reason": NOT_TO_BE_MERGED["nan-weights"]}
            await goes_up(attacked, "peer_verdicts", 0, **wanted)
            await BEHAVIOURS[REPLAY](member)
            fetched, reached = len(member.fetched), attacked.round() + 3
            async with asyncio.timeout(DEADLINE_S):
                while await asyncio.to_thread(attacked.round) < reached:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert len(member.fetched) == fetched

    asyncio.run(misbehave())
    attacked.check_progress()


def test_code_instead_of_weights_is_refused_and_never_run(
    attacked: AttackedNode, tmp_path: Path
) -> None:
    """What executes the sender's code where received bytes are unpickled is only bytes here."""
    marker = tmp_path / "code-was-run"
    pickle.loads(pickled(marker))  # noqa: S301 - to show what others let happen
    assert marker.exists()

    ours = marker_of(attacked.node.directory)
    for name, series, reason in (
        ("pickle-as-frame", "transfer_errors", "malformed"),
        ("pickle-as-file", "transfer_errors", "checksum"),
        ("pickle-as-tensors", "peer_verdicts", None),
    ):
        verdict = "rejected" if series == "peer_verdicts" else None
        before = attacked.count(series, peer=B, reason=reason, verdict=verdict)
        command = [sys.executable, "-m", "tests.byzantine.peer", "--behaviour", name]
        command += [
            "--home",
            str(attacked.attacker.directory),
            "--node",
            str(attacked.node.directory),
        ]
        with subprocess.Popen(command, env=package_environment(), cwd=ROOT) as peer:
            try:
                up = goes_up(attacked, series, before, peer=B, reason=reason, verdict=verdict)
                asyncio.run(up)
            finally:
                peer.terminate()
    assert not ours.exists()
    attacked.check_progress()


def test_no_imported_module_unpickles_data() -> None:
    """The daemon and the worker import no module that unpickles on load."""
    unpickling = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    package = Path(lightyear_node.__file__).parent
    for path in package.rglob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.Import):
                names = {alias.name.partition(".")[0] for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom):
                names = {(statement.module or "").partition(".")[0]}
            else:
                continue
            assert not names & unpickling, path
