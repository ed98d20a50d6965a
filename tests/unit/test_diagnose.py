"""What two greetings, compared, tell an operator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightyear_node.records import Check, Digest, Hello, Mark, PeerName
from lightyear_node.transport.diagnose import UNKNOWN_DIGEST, cannot_be_asked, compare, duration

from .sites import HELLO

B = PeerName("site-b")
NAMES = ["version", "federation", "agreement", "schema", "initial_model", "clock"]
OTHER = Digest("99" * 32)


def differing(theirs: Hello, ours: Hello = HELLO, offset_s: float = 0.0) -> tuple[list[str], Check]:
    """The links that were reached, and the only one that does not hold."""
    checks = compare(B, ours, theirs, offset_s)
    [odd] = [check for check in checks if check.mark is not Mark.HOLDS]
    assert odd.advice
    return [check.name for check in checks], odd


def test_two_that_fit() -> None:
    checks = compare(B, HELLO, replace(HELLO, boot_id="x", round=9, lamport=3), 59.0)
    assert [check.name for check in checks] == NAMES
    assert {check.mark for check in checks} == {Mark.HOLDS}


@pytest.mark.parametrize(
    ("theirs", "fits"), [((3, 5), True), ((1, 1), True), ((4, 5), False), ((0, 0), False)]
)
def test_versions_fit_when_their_ranges_overlap(theirs: tuple[int, int], fits: bool) -> None:
    answer = replace(HELLO, version_min=theirs[0], version_max=theirs[1])
    assert (compare(B, HELLO, answer, 0.0)[0].mark is Mark.HOLDS) == fits


@pytest.mark.parametrize(
    ("changed", "reached", "words"),
    [
        ({"version_min": 4, "version_max": 5}, 1, "it speaks protocol 4 to 5, we speak 1 to 3"),
        ({"federation": "ward"}, 2, "'ward', we to 'chest-xray'"),
        ({"schema": OTHER}, 4, "(schema 999999999999, ours is cdcdcdcdcdcd)"),
    ],
)
def test_what_keeps_sites_apart_ends_the_chain_with_both_values(
    changed: dict[str, str | int], reached: int, words: str
) -> None:
    names, odd = differing(replace(HELLO, **changed))  # type: ignore[arg-type]
    assert names == NAMES[:reached]
    assert odd.mark is Mark.BROKEN
    assert words in odd.about


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"agreement": OTHER}, "its peers.yaml is 999999999999, ours is 010101010101"),
        ({"initial_model": OTHER}, "999999999999, than we did, 020202020202"),
    ],
)
def test_what_somebody_should_look_at_does_not_end_it(
    changed: dict[str, Digest], words: str
) -> None:
    names, odd = differing(replace(HELLO, **changed))  # type: ignore[arg-type]
    assert names == NAMES
    assert odd.mark is Mark.DIFFERS
    assert words in odd.about


def test_what_is_not_known_here_is_not_compared() -> None:
    ours = replace(HELLO, schema=UNKNOWN_DIGEST, initial_model=UNKNOWN_DIGEST)
    marks = [check.mark for check in compare(B, ours, HELLO, 0.0)]
    assert marks[3:] == [Mark.NOT_KNOWN, Mark.NOT_KNOWN, Mark.HOLDS]


@pytest.mark.parametrize(
    ("offset_s", "words"),
    [
        (61.0, "1 min 1 s ahead of"),
        (-7200.0, "2 h 0 min behind"),
        (86399.7, "1 d 0 h ahead of"),
        (-400 * 86400.0, "400 d 0 h behind"),
    ],
)
def test_a_clock_is_off_by_so_much(offset_s: float, words: str) -> None:
    _, odd = differing(HELLO, offset_s=offset_s)
    assert (odd.name, odd.mark) == ("clock", Mark.DIFFERS)
    assert odd.about == f"their clock is {words} ours"


def test_durations_round_to_what_matters() -> None:
    assert duration(3599.9) == "59 min 59 s"
    assert duration(3600 * 5 + 29) == "5 h 0 min"
    assert duration(3600 * 23.999) == "1 d 0 h"


def test_who_has_no_address_is_not_to_blame() -> None:
    diagnosis = cannot_be_asked(B)
    assert not diagnosis.broken
    assert "it dials us" in diagnosis.about
