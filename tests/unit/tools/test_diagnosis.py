"""The comparison of two greetings, and its messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightyear_node.tools.diagnosis import UNKNOWN_DIGEST, compare, duration, without_address
from lightyear_node.types import Check, Digest, Hello, Mark, PeerName
from tests.support.tls_sites import HELLO

B = PeerName("site-b")
NAMES = ["version", "federation", "agreement", "schema", "initial_model", "clock"]
OTHER = Digest("99" * 32)


def differing(theirs: Hello, ours: Hello = HELLO, offset_s: float = 0.0) -> tuple[list[str], Check]:
    """The steps that were reached, and the only one that does not hold."""
    checks = compare(B, ours, theirs, offset_s)
    [odd] = [check for check in checks if check.mark is not Mark.HOLDS]
    assert odd.advice
    return [check.name for check in checks], odd


def test_compatible_sites() -> None:
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
    ("changed", "reached", "message"),
    [
        ({"version_min": 4, "version_max": 5}, 1, "it speaks protocol 4 to 5, we speak 1 to 3"),
        ({"federation": "other"}, 2, "'other', we to 'chest-xray'"),
        ({"schema": OTHER}, 4, "(schema 999999999999, ours is cdcdcdcdcdcd)"),
    ],
)
def test_an_incompatibility_ends_the_comparison_and_shows_both_values(
    changed: dict[str, str | int], reached: int, message: str
) -> None:
    names, odd = differing(replace(HELLO, **changed))  # type: ignore[arg-type]
    assert names == NAMES[:reached]
    assert odd.mark is Mark.BROKEN
    assert message in odd.about


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"agreement": OTHER}, "its peers.yaml is 999999999999, ours is 010101010101"),
        ({"initial_model": OTHER}, "999999999999, than we did, 020202020202"),
    ],
)
def test_a_harmless_difference_does_not_end_the_comparison(
    changed: dict[str, Digest], message: str
) -> None:
    names, odd = differing(replace(HELLO, **changed))  # type: ignore[arg-type]
    assert names == NAMES
    assert odd.mark is Mark.DIFFERS
    assert message in odd.about


def test_unknown_digests_are_not_compared() -> None:
    ours = replace(HELLO, schema=UNKNOWN_DIGEST, initial_model=UNKNOWN_DIGEST)
    marks = [check.mark for check in compare(B, ours, HELLO, 0.0)]
    assert marks[3:] == [Mark.NOT_KNOWN, Mark.NOT_KNOWN, Mark.HOLDS]


@pytest.mark.parametrize(
    ("offset_s", "message"),
    [
        (61.0, "1 min 1 s ahead of"),
        (-7200.0, "2 h 0 min behind"),
        (86399.7, "1 d 0 h ahead of"),
        (-400 * 86400.0, "400 d 0 h behind"),
    ],
)
def test_the_clock_difference_is_shown(offset_s: float, message: str) -> None:
    _, odd = differing(HELLO, offset_s=offset_s)
    assert (odd.name, odd.mark) == ("clock", Mark.DIFFERS)
    assert odd.about == f"their clock is {message} ours"


def test_durations_have_two_units() -> None:
    assert duration(3599.9) == "59 min 59 s"
    assert duration(3600 * 5 + 29) == "5 h 0 min"
    assert duration(3600 * 23.999) == "1 d 0 h"


def test_a_peer_without_an_address_is_not_reported_as_broken() -> None:
    diagnosis = without_address(B)
    assert not diagnosis.broken
    assert "it dials us" in diagnosis.about


def test_the_advice_names_the_settings_that_need_a_restart() -> None:
    _, odd = differing(replace(HELLO, agreement=OTHER))
    assert odd.name == "agreement"
    assert "running nodes notice a new file at once" in odd.advice
    assert "`rule`, `seed`, `exchange` and `federation` take effect after a restart" in odd.advice
