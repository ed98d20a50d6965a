"""What a person sees while a local federation runs, and the summary at the end.

On a terminal one live picture; elsewhere a line when something has happened.  Verdicts are told
apart by a mark and by colour, so that neither alone is needed.  Nothing here asks the sites
anything: it is handed what they said.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from lightyear_node.lab.federation import Statuses
from lightyear_node.lab.results import Results
from lightyear_node.observe.words import drawable
from lightyear_node.records import PeerName

METRIC = "accuracy"
MALFUNCTIONS = {
    "ana": "noise",
    "sfa": "flipped signs",
    "random": "random weights",
    "dynamic": "changing faults",
}
SCORED_CELL_WIDTH = 7
BARE_CELL_WIDTH = 4

Watch = Callable[[Statuses], None]


@dataclass(frozen=True, slots=True)
class Cast:
    """Who takes part, and what is known before anybody speaks."""

    federation: str
    sites: Sequence[PeerName]
    rounds: int
    malfunctions: Mapping[PeerName, str]


@dataclass(frozen=True, slots=True)
class Marks:
    accepted: str
    rejected: str
    missing: str
    own: str

    @classmethod
    def of(cls, console: Console) -> Marks:
        unicode = console.encoding.lower().startswith("utf")
        return cls("✓", "✗", "?", "·") if unicode else cls("+", "x", "?", ".")


@contextmanager
def watching(console: Console, cast: Cast, *, shown: bool = True) -> Iterator[Watch]:
    """Gives a function to be called with everything the sites say."""
    if not shown:
        yield lambda statuses: None
    elif not drawable(console):
        yield _Lines(console, cast).update
    else:
        began, marks = time.monotonic(), Marks.of(console)
        first = picture(cast, {}, 0.0, marks, console.width)
        with Live(first, console=console, refresh_per_second=8) as live:
            yield lambda statuses: live.update(
                picture(cast, statuses, time.monotonic() - began, marks, console.width)
            )


def picture(
    cast: Cast, statuses: Statuses, elapsed_s: float, marks: Marks, width: int
) -> RenderableType:
    """The whole live view, from what the sites last said."""
    done = rounds_done(cast, statuses)
    header = Text.assemble(
        (f" {cast.federation} ", "bold reverse"),
        f"  {done} of {cast.rounds} rounds done",
        (f"   {elapsed_s:.0f} s   {_traffic(statuses)}", "dim"),
    )
    parts: list[RenderableType] = [header]
    for name, kind in cast.malfunctions.items():
        parts.append(Text(f"{name} malfunctions: it sends {in_short(kind)}", "red"))
    parts.append(_sites(cast, statuses))
    matrix = _matrix(cast, statuses, marks, width) if _has_verdicts(statuses) else None
    if matrix is not None:
        legend = Text.assemble(
            ("who accepts whom", "bold"),
            ("  (row judges column, by agreement)  ", "dim"),
            (f"{marks.accepted} accepted  ", "green"),
            (f"{marks.rejected} rejected  ", "bold red"),
            (f"{marks.missing} missing", "yellow"),
        )
        parts += [legend, matrix]
    return Group(*parts)


def summary(results: Results) -> RenderableType:
    """The outcome in one table and three sentences."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("site")
    for heading in ("alone", "federated", "everyone averaged in"):
        table.add_column(heading, justify="right", no_wrap=True)
    for site in results.sites:
        table.add_row(
            _who(site.name, results.malfunction if site.malfunctioning else None),
            f"{site.alone:.3f}",
            Text(f"{site.federated:.3f}", "bold"),
            f"{site.averaged:.3f}",
        )
    table.add_section()
    table.add_row(
        "mean of the honest" if results.bad else "mean",
        f"{results.honest_alone:.3f}",
        Text(f"{results.honest_federated:.3f}", "bold"),
        f"{results.everyone_averaged:.3f}",
    )
    lines: list[RenderableType] = [
        Text(f"Accuracy on each site's own test data after {results.rounds} rounds:"),
        table,
        Text(verdicts_in_words(results)),
        Text(
            f"Weights fetched: {size(results.wire_bytes)} on the wire"
            f" for {size(results.raw_bytes)} of models; {results.seconds:.0f} s in all."
        ),
        Text.assemble("Report: ", (str(results.report), "bold")),
    ]
    return Group(*lines)


def verdicts_in_words(results: Results) -> str:
    counts = results.verdict_counts()
    honest = counts["honest_accepted"] + counts["honest_rejected"]
    words = f"{counts['honest_accepted']} of {honest} honest updates were accepted"
    if results.bad:
        bad = counts["malfunctioning_accepted"] + counts["malfunctioning_rejected"]
        words += f", {counts['malfunctioning_rejected']} of {bad} malfunctioning ones rejected"
    return words + "."


def rounds_done(cast: Cast, statuses: Statuses) -> int:
    """How many rounds every site has behind it."""
    return min((_rounds_at(cast, statuses.get(name)) for name in cast.sites), default=0)


def in_short(malfunction: str) -> str:
    """What a malfunctioning site sends, in words."""
    return MALFUNCTIONS.get(malfunction, malfunction)


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes everything")


def short_names(names: Sequence[PeerName]) -> dict[PeerName, str]:
    """Without what all have in common: `site-a` among its like is `a`."""
    prefixes = {name.rpartition("-")[0] + "-" for name in names}
    common = prefixes.pop() if len(prefixes) == 1 else ""
    return {name: name.removeprefix(common) for name in names}


class _Lines:
    """For a log file or a pipe: says only what is new."""

    def __init__(self, console: Console, cast: Cast) -> None:
        self._console = console
        self._cast = cast
        self._up = 0
        self._done = 0
        self._began = time.monotonic()

    def update(self, statuses: Statuses) -> None:
        up = sum(status is not None for status in statuses.values())
        if up > self._up:
            self._up = up
            self._say(f"{up} of {len(self._cast.sites)} sites are up")
        done = rounds_done(self._cast, statuses)
        if done > self._done:
            self._done = done
            said = [status for status in statuses.values() if status]
            self._say(f"round {done} of {self._cast.rounds} done, {_in_words(said)}")

    def _say(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._began
        self._console.print(f"{elapsed_s:5.1f} s  {text}", highlight=False, soft_wrap=True)


def _in_words(said: Sequence[Mapping[str, Any]]) -> str:
    scores = [s["metrics"]["merged"][METRIC] for s in said if METRIC in s["metrics"]["merged"]]
    words = f"{METRIC} {min(scores):.3f} to {max(scores):.3f}" if scores else f"no {METRIC} yet"
    rejected = Counter(
        (peer["name"], peer["reason"])
        for status in said
        for peer in status["peers"]
        if peer["verdict"] == "rejected"
    )
    for (name, reason), count in sorted(rejected.items()):
        words += f"; {name} rejected by {count} ({reason})"
    return words


def _sites(cast: Cast, statuses: Statuses) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("site", no_wrap=True)
    table.add_column("rounds", justify="right", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column(METRIC, justify="right", no_wrap=True)
    table.add_column("what it is doing", ratio=1, no_wrap=True, overflow="ellipsis")
    for name in cast.sites:
        status = statuses.get(name)
        label = Text(f"{name} !", "red") if name in cast.malfunctions else Text(name)
        if status is None:
            table.add_row(label, "", Text("starting", "dim"), "", Text("loading its model", "dim"))
            continue
        merged, local = status["metrics"]["merged"], status["metrics"]["local"]
        score = merged.get(METRIC, local.get(METRIC))
        part = status.get("progress")
        share = f" {100 * part[0] // max(part[1], 1)} %" if part else ""
        phase = Text(status["phase"] + share, "green" if status["finished"] else "")
        table.add_row(
            label,
            f"{_rounds_at(cast, status)}/{cast.rounds}",
            phase,
            "" if score is None else f"{score:.3f}",
            Text(status["waiting"], "dim"),
        )
    return table


def _who(name: PeerName, malfunction: str | None) -> Text:
    if malfunction is None:
        return Text(name)
    return Text(f"{name} (sends {in_short(malfunction)})", "red")


def _matrix(cast: Cast, statuses: Statuses, marks: Marks, width: int) -> Table | None:
    """None when even bare marks would not fit."""
    names = short_names(cast.sites)
    widest = max(len(name) for name in names.values()) + 2
    room = (width - widest) / len(names)
    if room < max(BARE_CELL_WIDTH, widest):
        return None
    scored = room >= max(SCORED_CELL_WIDTH, widest)
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("")
    for name in cast.sites:
        table.add_column(Text(names[name], _name_style(cast, name)), justify="center")
    for judge in cast.sites:
        status = statuses.get(judge)
        said = {peer["name"]: peer for peer in status["peers"]} if status else {}
        cells = [
            Text(marks.own, "dim") if peer == judge else _cell(said.get(peer), marks, scored)
            for peer in cast.sites
        ]
        table.add_row(Text(names[judge], _name_style(cast, judge)), *cells)
    return table


def _cell(said: Mapping[str, Any] | None, marks: Marks, scored: bool) -> Text:
    verdict = said["verdict"] if said else None
    if said is None or verdict is None:
        return Text("")
    mark, style = {
        "accepted": (marks.accepted, "green"),
        "rejected": (marks.rejected, "bold red"),
    }.get(verdict, (marks.missing, "yellow"))
    score = said["agreement"]
    number = f" {score:.2f}" if scored and score is not None and verdict != "missing" else ""
    return Text(mark + number, style)


def _name_style(cast: Cast, name: PeerName) -> str:
    return "red" if name in cast.malfunctions else "bold"


def _rounds_at(cast: Cast, status: Mapping[str, Any] | None) -> int:
    if status is None:
        return 0
    return cast.rounds if status["finished"] else min(status["round"], cast.rounds)


def _traffic(statuses: Statuses) -> str:
    said = [status["bytes"] for status in statuses.values() if status]
    raw, wire = (sum(one[key] for one in said) for key in ("raw", "wire"))
    return f"{size(raw)} of weights moved as {size(wire)}" if raw else "no weights moved yet"


def _has_verdicts(statuses: Statuses) -> bool:
    said = [status["peers"] for status in statuses.values() if status]
    return any(peer["verdict"] for peers in said for peer in peers)
