"""The failpoints themselves: they act once, at the chosen point, and only in tests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import lightyear_node
from tests.support.failpoints import Failpoint, Trigger


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("before:seal", Failpoint("before", "seal")),
        ("after:decision:3", Failpoint("after", "decision", 3)),
        ("before:adopt-updates:2", Failpoint("before", "adopt-updates", 2)),
    ],
)
def test_a_failpoint_is_parsed(text: str, expected: Failpoint) -> None:
    assert Failpoint.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "seal", "during:seal", "before:", "after:seal:two", "a:b:1:2"]
)
def test_an_invalid_failpoint_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Failpoint.parse(text)


def steps_with_failpoint(when: str, point: str, nth: int) -> list[str]:
    """Run three steps, two of them at the same point; return what happened."""
    happened: list[str] = []
    trigger = Trigger(Failpoint(when, point, nth), lambda here: happened.append("acts"))
    step = trigger.around(lambda kind, text: kind, lambda kind, text: happened.append(text))
    for kind, text in (("seal", "first seal"), ("commit", "commit"), ("seal", "second seal")):
        step(kind, text)
    return happened


def test_a_trigger_acts_only_at_its_point() -> None:
    steps = ["first seal", "commit", "second seal"]
    assert steps_with_failpoint("before", "seal", 1) == ["acts", *steps]
    assert steps_with_failpoint("after", "seal", 1) == ["first seal", "acts", *steps[1:]]
    assert steps_with_failpoint("before", "seal", 2) == [
        "first seal",
        "commit",
        "acts",
        "second seal",
    ]
    assert steps_with_failpoint("after", "seal", 2) == [*steps, "acts"]
    assert steps_with_failpoint("after", "commit", 1) == [
        "first seal",
        "commit",
        "acts",
        "second seal",
    ]
    assert (
        steps_with_failpoint("after", "seal", 3)
        == steps_with_failpoint("before", "start", 1)
        == steps
    )


def test_concurrent_steps_are_numbered_by_their_start() -> None:
    happened: list[str] = []
    trigger = Trigger(Failpoint("after", "fetch", 1), lambda here: happened.append("acts"))

    async def fetch(name: str, ready: asyncio.Event) -> None:
        await ready.wait()
        happened.append(name)

    async def two() -> None:
        watched = trigger.around_async("fetch", fetch)
        late, soon = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(watched("began first", late))
            second = group.create_task(watched("began second", soon))
            soon.set()
            await second
            late.set()

    asyncio.run(two())
    assert happened == ["began second", "began first", "acts"]


def test_the_product_has_no_failpoints() -> None:
    package = Path(lightyear_node.__file__).parent
    for file in package.rglob("*.py"):
        assert "failpoint" not in file.read_text(encoding="utf-8").lower(), file
