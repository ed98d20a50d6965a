"""Shortened site names stay distinct."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from lightyear_node.cli.status_view import render_status
from lightyear_node.observe.short_names import shortened
from tests.unit.cli.test_status import status

NORTH = ["hospital-north-cardiology", "hospital-north-radiology", "hospital-north"]
names = st.text("ab-", min_size=1, max_size=63)


@given(st.lists(names, unique=True, max_size=64), st.integers(3, 70))
def test_shortened_names_fit_and_stay_different(given: list[str], width: int) -> None:
    short = shortened(given, width)
    assert list(short) == given
    assert len(set(short.values())) == len(given)
    assert all(len(one) <= width for one in short.values())
    assert all(short[name] == name for name in given if len(name) <= width)


def test_both_ends_are_kept_if_that_is_enough() -> None:
    assert shortened(["hospital-north", "hospital-south"], 11) == {
        "hospital-north": "hospi…north",
        "hospital-south": "hospi…south",
    }
    assert shortened(["site-with-middle-a-b", "site-with-middle-c-b"], 6)[
        "site-with-middle-c-b"
    ].endswith("c-b")


def shown(data: dict[str, Any], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    for part in render_status(data):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [50, 60, 80, 100, 160])
def test_status_shows_distinct_peer_names_at_any_width(width: int) -> None:
    peer = status()["peers"][0]
    data = status(peers=[{**peer, "name": name} for name in NORTH])
    lines = shown(data, width)
    first = next(number for number, line in enumerate(lines) if line.startswith(" peer "))
    column = lines[first].index("state")
    found = [line[:column].strip() for line in lines[first + 1 : -1] if line[:column].strip()]
    assert len(found[:3]) == len(set(found[:3])) == 3
    if width == 160:
        assert found[:3] == NORTH
