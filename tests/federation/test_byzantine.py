"""A member with a valid certificate that does everything wrong: refused, counted, and life goes on.

One federation for all of it: site-b misbehaves, the other three are real nodes, and of four sites
one may be faulty.
"""

from __future__ import annotations

import ast
import asyncio
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import calls  # noqa: F401 - adds its behaviours
import pytest
from asking import DEADLINE_S, A, B, LayOut
from behaviours import BEHAVIOURS, marker_of, pickled
from member import Member
from scene import Scene

import lightyear_node
from lightyear_node.config.agreement import BarrierTerms
from lightyear_node.lab.federation import Federation, package_environment

PEER = Path(__file__).parents[1] / "byzantine" / "peer.py"
ONE_MAY_LIE = BarrierTerms(
    min_peers=2, faulty_max=1, heartbeat=0.5, grace=3.0, suspect=5.0, observe=2.0
)

NOT_THE_UPDATE = {
    "bomb": "too_large",
    "window-bomb": "too_large",
    "tebibyte": "too_large",
    "oversized-chunk": "too_large",
    "oversized-piece": "too_large",
    "one-chunk-too-many": "too_large",
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
    "other-header": "checksum",
    "pickle-as-file": "checksum",
    "truncated-stream": "truncated",
}
"""Fetched, and given up for this reason."""
NOT_SOUND = {
    "other-schema": "schema_mismatch",
    "short-update": "schema_mismatch",
    "huge-update": "too_large",
    "beyond-all-rounds": "malformed",
    "stamp-beyond-reach": "malformed",
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
"""Whole, sound and rejected by the rule; what random numbers fail first is the rule's business.
Each is good for so many rounds that the node wants no other, and so has a federation of its own."""
NOT_TO_BE_ASKED = {
    "large-announcement": "malformed",
    "oversized-announcement": "malformed",
    "malformed-announcement": "malformed",
    "malformed-greeting": "malformed",
    "drip-request": "malformed",
    "announce-flood": "too_often",
    "fetch-flood": "too_many_fetches",
    "lend-flood": "too_many_calls",
    "nothing-but-rubbish": "cooling_down",
}
"""Calls that the node denies."""
REPLAY = "replayed-update"
"""Nothing to count: what is older than the newest is no news."""


@pytest.fixture
def scene(lay_out_sites: LayOut) -> Iterator[Scene]:
    homes = lay_out_sites(4, rounds=100_000, barrier=ONE_MAY_LIE)
    bothering = homes.pop(1)
    with Federation(homes) as federation:
        federation.wait_until(lambda s: s[A] is not None and s[A]["round"] >= 1, DEADLINE_S)
        yield Scene(federation, homes[0], bothering)


async def goes_up(scene: Scene, series: str, since: float, **labels: str | None) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while await asyncio.to_thread(scene.count, series, **labels) <= since:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.mark.slow
def test_rubbish_from_a_member_is_refused_with_its_reason(scene: Scene) -> None:
    """Everything that a member can do, one after the other, against one node."""
    tables: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("transfer_errors", NOT_THE_UPDATE, {"peer": B}),
        ("peer_refusals", NOT_SOUND, {"peer": B}),
        ("peer_calls_denied", NOT_TO_BE_ASKED, {"peer": B}),
    ]
    elsewhere = {*NOT_TO_BE_MERGED, REPLAY}
    assert {name for _, table, _ in tables for name in table} | elsewhere == {*BEHAVIOURS}

    async def misbehave() -> None:
        async with Member(scene.bothering.directory, scene.node.directory) as member:
            await asyncio.wait_for(member.meet(), DEADLINE_S)
            for series, table, labels in tables:
                for name, reason in table.items():
                    wanted = {**labels, "reason": reason}
                    before = scene.count(series, **wanted)
                    await BEHAVIOURS[name](member)
                    try:
                        await goes_up(scene, series, before, **wanted)
                    except TimeoutError:
                        pytest.fail(f"{name} was not counted in {series} as {reason}")

    asyncio.run(misbehave())
    assert scene.round() < 10_000, "one liar moves nobody"
    scene.check_that_life_goes_on()
    assert not marker_of(scene.node.directory).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_TO_BE_MERGED)
def test_a_sound_update_of_a_bad_model_is_rejected_by_the_rule(scene: Scene, name: str) -> None:
    async def misbehave() -> None:
        async with Member(scene.bothering.directory, scene.node.directory) as member:
            await asyncio.wait_for(member.meet(), DEADLINE_S)
            await BEHAVIOURS[name](member)
            wanted = {"peer": B, "verdict": "rejected", "reason": NOT_TO_BE_MERGED[name]}
            await goes_up(scene, "peer_verdicts", 0, **wanted)

    asyncio.run(misbehave())
    assert scene.round() < 10_000, "one liar moves nobody"
    scene.check_that_life_goes_on()


def test_an_update_that_was_announced_before_is_not_fetched_again(scene: Scene) -> None:
    async def misbehave() -> None:
        async with Member(scene.bothering.directory, scene.node.directory) as member:
            await asyncio.wait_for(member.meet(), DEADLINE_S)
            # Both so far ahead that the node would want either of them for many rounds.
            await BEHAVIOURS["garbage-tail"](member)
            await goes_up(scene, "transfer_errors", 0, peer=B, reason="malformed")
            await BEHAVIOURS["nan-weights"](member)
            await goes_up(scene, "peer_verdicts", 0, peer=B, verdict="rejected")
            await BEHAVIOURS[REPLAY](member)
            fetched, reached = len(member.fetched), scene.round() + 3
            async with asyncio.timeout(DEADLINE_S):
                while await asyncio.to_thread(scene.round) < reached:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            assert len(member.fetched) == fetched

    asyncio.run(misbehave())
    scene.check_that_life_goes_on()


def test_code_instead_of_weights_is_refused_and_never_run(scene: Scene, tmp_path: Path) -> None:
    """What executes the sender's code where received bytes are unpickled is only bytes here."""
    marker = tmp_path / "code-was-run"
    pickle.loads(pickled(marker))  # noqa: S301 - to show what others let happen
    assert marker.exists()

    ours = marker_of(scene.node.directory)
    for name, series, reason in (
        ("pickle-as-frame", "transfer_errors", "malformed"),
        ("pickle-as-file", "transfer_errors", "checksum"),
        ("pickle-as-tensors", "peer_verdicts", None),
    ):
        verdict = "rejected" if series == "peer_verdicts" else None
        before = scene.count(series, peer=B, reason=reason, verdict=verdict)
        command = [sys.executable, str(PEER), "--behaviour", name]
        command += ["--home", str(scene.bothering.directory), "--node", str(scene.node.directory)]
        with subprocess.Popen(command, env=package_environment()) as peer:
            try:
                up = goes_up(scene, series, before, peer=B, reason=reason, verdict=verdict)
                asyncio.run(up)
            finally:
                peer.terminate()
    assert not ours.exists()
    scene.check_that_life_goes_on()


def test_no_module_could_unpickle_anything() -> None:
    """Of those who unpickle when asked to load, the daemon and the worker import none."""
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
