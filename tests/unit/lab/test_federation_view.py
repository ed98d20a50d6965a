"""The view of a federation: the same facts on a terminal, in a log file, without colour."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console, RenderableType

from lightyear_node.lab.federation_view import (
    FederationInfo,
    Marks,
    render_view,
    short_names,
    size,
    summary,
    watching,
)
from lightyear_node.lab.progress_bar import progress_bar_shown
from lightyear_node.types import PeerName
from tests.support.staged_demo import MakeResults, status_of

NAMES = [PeerName(f"site-{letter}") for letter in "abcd"]
BAD = NAMES[-1]
INFO = FederationInfo("demo", NAMES, 5, {BAD: "sfa"})
MARKS = Marks("✓", "✗", "?", "·")


def statuses(round: int = 2, **changes: Any) -> dict[PeerName, dict[str, Any] | None]:
    answers: dict[PeerName, dict[str, Any] | None] = {}
    for name in NAMES:
        others = [other for other in NAMES if other != name]
        status = status_of(name, others, rounds=5, bad=[BAD])
        answers[name] = status | {"round": round, "finished": False, "phase": "training"} | changes
    return answers


def text(what: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(what)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_sites_without_an_answer_are_starting() -> None:
    shown = text(render_view(INFO, {}, 0.0, MARKS, 100))
    assert shown.count("starting") == 4
    assert "0 of 5 rounds done" in shown
    assert "who accepts whom" not in shown


def test_the_matrix_marks_verdicts_without_colour() -> None:
    answers = statuses()
    first = answers[NAMES[0]]
    assert first is not None
    first["peers"][0] |= {"verdict": "missing", "agreement": None}
    shown = text(render_view(INFO, answers, 12.0, MARKS, 100))
    lines = {line.split()[0]: line.split()[1:] for line in shown.splitlines()[-4:]}
    assert lines == {
        "a": ["·", "?", "✓", "0.97", "✗", "0.41"],
        "b": ["✓", "0.97", "·", "✓", "0.97", "✗", "0.41"],
        "c": ["✓", "0.97", "✓", "0.97", "·", "✗", "0.41"],
        "d": ["✓", "0.97", "✓", "0.97", "✓", "0.97", "·"],
    }
    assert "site-d malfunctions: it sends flipped signs" in shown
    assert "2 of 5 rounds done" in shown
    assert "4.0 kB of weights moved as 1.6 kB" in shown


def test_the_slowest_site_determines_the_rounds_done() -> None:
    answers = statuses(4)
    answers[NAMES[1]] = statuses(1)[NAMES[1]]
    assert "1 of 5 rounds done" in text(render_view(INFO, answers, 0, MARKS, 100))
    answers[NAMES[1]] = None
    assert "0 of 5 rounds done" in text(render_view(INFO, answers, 0, MARKS, 100))
    ended = statuses(7, finished=True, phase="finished")
    assert "5 of 5 rounds done" in text(render_view(INFO, ended, 0, MARKS, 100))


def test_training_shows_its_progress() -> None:
    assert "training 25 %" in text(render_view(INFO, statuses(progress=[10, 40]), 0, MARKS, 100))


@pytest.mark.parametrize(
    ("width", "scores", "matrix"), [(100, True, True), (24, False, True), (12, False, False)]
)
def test_a_narrow_terminal_drops_numbers_first_then_the_matrix(
    width: int, scores: bool, matrix: bool
) -> None:
    shown = text(render_view(INFO, statuses(), 0, MARKS, width), 200)
    assert ("✓ 0.97" in shown) is scores
    assert ("who accepts whom" in shown) is matrix


def test_shortened_names_stay_different() -> None:
    names = [PeerName(f"hospital-north-{i}-ward") for i in range(3)] + [PeerName("clinic")]
    answers = {
        name: status_of(name, [other for other in names if other != name], rounds=5, bad=[])
        for name in names
    }
    for width in (60, 80, 120):
        shown = text(
            render_view(FederationInfo("demo", names, 5, {}), answers, 0, MARKS, width), width
        )
        lines = shown.splitlines()
        assert "who accepts whom" in shown
        columns, *rows = lines[-5:]
        assert len(set(columns.split())) == len({row.split()[0] for row in rows}) == 4
        heading = next(n for n, line in enumerate(lines) if line.startswith(" site "))
        assert len({line.split()[0] for line in lines[heading + 2 : heading + 6]}) == 4


def test_marks_are_ascii_without_unicode() -> None:
    plain = Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert Marks.of(plain) == Marks("+", "x", "?", ".")
    assert Marks.of(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))) == MARKS


def test_a_log_file_gets_a_line_for_each_change() -> None:
    console = Console(file=io.StringIO(), width=60)
    with watching(console, INFO) as watch:
        watch(dict.fromkeys(NAMES))
        for answers in (statuses(0), statuses(0), statuses(1), statuses(1), statuses(3)):
            watch(answers)
    assert isinstance(console.file, io.StringIO)
    lines = [re.sub(r"^ *[\d.]+ s  ", "", line) for line in console.file.getvalue().splitlines()]
    rest = "accuracy 0.950 to 0.950; site-d rejected by 3 (too_far)"
    assert lines == [
        "4 of 4 sites are up",
        f"1 of 5 rounds done, {rest}",
        f"3 of 5 rounds done, {rest}",
    ]


def test_a_terminal_gets_the_live_view() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with watching(console, INFO) as watch:
        watch(statuses(3))
    assert isinstance(console.file, io.StringIO)
    assert "3 of 5 rounds done" in console.file.getvalue()


def test_without_view_nothing_is_printed() -> None:
    for terminal in (False, True):
        console = Console(file=io.StringIO(), force_terminal=terminal)
        with watching(console, INFO, shown=False) as watch:
            watch(statuses())
        with progress_bar_shown(console, "comparing", shown=False) as count:
            count(1, 2)
        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue() == ""


def test_the_progress_bar_prints_its_label_on_any_output() -> None:
    for terminal in (False, True):
        console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
        with progress_bar_shown(console, "comparing") as count:
            count(1, 2)
        assert isinstance(console.file, io.StringIO)
        assert "comparing" in console.file.getvalue()


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    console.print(render_view(INFO, statuses(), 0, MARKS, 100))
    assert isinstance(console.file, io.StringIO)
    colours = re.findall(r"\x1b\[[\d;]*3[0-7][\d;]*m", console.file.getvalue())
    assert colours == []


def test_the_summary_contains_all_means(make_results: MakeResults) -> None:
    shown = text(summary(make_results(alone=0.8, federated=0.9, averaged=0.3)), 80)
    assert re.search(r"site-a +0\.800 +0\.900 +0\.300", shown)
    assert re.search(r"site-d \(sends flipped signs\) +0\.100 +0\.200 +0\.050", shown)
    assert re.search(r"mean of the honest +0\.800 +0\.900 +0\.300", shown)
    assert "27 of 27 honest updates were accepted, 9 of 9 malfunctioning ones rejected." in shown
    assert "report.html" in shown.replace("\n", "")


def test_sizes_and_names_are_short() -> None:
    assert [size(n) for n in (999, 1000, 1_250_000, 3e9, 5e12)] == [
        "999 B",
        "1.0 kB",
        "1.2 MB",
        "3.0 GB",
        "5000.0 GB",
    ]
    assert short_names(NAMES)[NAMES[0]] == "a"
    unlike = [PeerName("north-a"), PeerName("south-a")]
    assert short_names(unlike) == {name: name for name in unlike}
