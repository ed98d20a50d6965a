"""The failpoints themselves: they burn once, where they were told to, and only in tests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from failpoints import Failpoint, Fuse

import lightyear_node


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("before:seal", Failpoint("before", "seal")),
        ("after:decision:3", Failpoint("after", "decision", 3)),
        ("before:adopt-updates:2", Failpoint("before", "adopt-updates", 2)),
    ],
)
def test_a_failpoint_is_a_moment_a_point_and_a_number(text: str, expected: Failpoint) -> None:
    assert Failpoint.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["", "seal", "during:seal", "before:", "after:seal:two", "a:b:1:2"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Failpoint.parse(text)


def told(when: str, point: str, nth: int) -> list[str]:
    """What happens when three steps are taken, two of them at the same point."""
    happened: list[str] = []
    fuse = Fuse(Failpoint(when, point, nth), lambda here: happened.append("burns"))
    step = fuse.around(lambda kind, text: kind, lambda kind, text: happened.append(text))
    for kind, text in (("seal", "first seal"), ("commit", "commit"), ("seal", "second seal")):
        step(kind, text)
    return happened


def test_it_burns_at_its_point_and_nowhere_else() -> None:
    steps = ["first seal", "commit", "second seal"]
    assert told("before", "seal", 1) == ["burns", *steps]
    assert told("after", "seal", 1) == ["first seal", "burns", *steps[1:]]
    assert told("before", "seal", 2) == ["first seal", "commit", "burns", "second seal"]
    assert told("after", "seal", 2) == [*steps, "burns"]
    assert told("after", "commit", 1) == ["first seal", "commit", "burns", "second seal"]
    assert told("after", "seal", 3) == told("before", "start", 1) == steps


def test_of_steps_side_by_side_the_first_that_began_is_the_first() -> None:
    happened: list[str] = []
    fuse = Fuse(Failpoint("after", "fetch", 1), lambda here: happened.append("burns"))

    async def fetch(name: str, ready: asyncio.Event) -> None:
        await ready.wait()
        happened.append(name)

    async def two() -> None:
        watched = fuse.around_waiting("fetch", fetch)
        late, soon = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(watched("began first", late))
            second = group.create_task(watched("began second", soon))
            soon.set()
            await second
            late.set()

    asyncio.run(two())
    assert happened == ["began second", "began first", "burns"]


def test_the_product_has_no_failpoints() -> None:
    package = Path(lightyear_node.__file__).parent
    for file in package.rglob("*.py"):
        assert "failpoint" not in file.read_text(encoding="utf-8").lower(), file
