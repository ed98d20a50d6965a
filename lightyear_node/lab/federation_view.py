"""Shows the progress of a local federation, and the summary at the end.

On a terminal a live view; elsewhere a line for each change.  Verdicts differ by mark and by colour.
Does no I/O with the sites: it is given their statuses.
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

from lightyear_node.lab.demo_results import DemoResults
from lightyear_node.lab.federation import Statuses
from lightyear_node.observe.progress import can_redraw
from lightyear_node.observe.short_names import NameCell, shortened
from lightyear_node.types import PeerName

METRIC = "accuracy"
MALFUNCTIONS = {
    "ana": "noise",
    "sfa": "flipped signs",
    "random": "random weights",
    "dynamic": "changing faults",
}
SCORED_CELL_WIDTH = 7
BARE_CELL_WIDTH = 4
NAME_WIDTH_MIN = 4
"""With less space for names of sites the matrix is left out."""

Watch = Callable[[Statuses], None]


@dataclass(frozen=True, slots=True)
class FederationInfo:
    """The sites of a federation and their malfunctions."""

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
def watching(console: Console, info: FederationInfo, *, shown: bool = True) -> Iterator[Watch]:
    """Show the federation; yields a function to call with the sites' statuses."""
    if not shown:
        yield lambda statuses: None
    elif not can_redraw(console):
        yield _Lines(console, info).update
    else:
        began, marks = time.monotonic(), Marks.of(console)
        first = render_view(info, {}, 0.0, marks, console.width)
        with Live(first, console=console, refresh_per_second=8) as live:
            yield lambda statuses: live.update(
                render_view(info, statuses, time.monotonic() - began, marks, console.width)
            )


def render_view(
    info: FederationInfo, statuses: Statuses, elapsed_s: float, marks: Marks, width: int
) -> RenderableType:
    """Render the live view from the sites' latest statuses."""
    done = rounds_done(info, statuses)
    header = Text.assemble(
        (f" {info.federation} ", "bold reverse"),
        f"  {done} of {info.rounds} rounds done",
        (f"   {elapsed_s:.0f} s   {_traffic(statuses)}", "dim"),
    )
    parts: list[RenderableType] = [header]
    for name, kind in info.malfunctions.items():
        parts.append(Text(f"{name} malfunctions: it sends {malfunction_text(kind)}", "red"))
    parts.append(_sites(info, statuses))
    matrix = _matrix(info, statuses, marks, width) if _has_verdicts(statuses) else None
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


def summary(results: DemoResults) -> RenderableType:
    """The results in one table and three sentences."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("site")
    for heading in ("alone", "federated", "everyone averaged in"):
        table.add_column(heading, justify="right", no_wrap=True)
    for site in results.sites:
        table.add_row(
            _site_label(site.name, results.malfunction if site.malfunctioning else None),
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
        Text(verdict_sentence(results)),
        Text(
            f"Weights fetched: {size(results.wire_bytes)} on the wire"
            f" for {size(results.raw_bytes)} of models; {results.seconds:.0f} s in total."
        ),
        Text.assemble("Report: ", (str(results.report), "bold")),
    ]
    return Group(*lines)


def verdict_sentence(results: DemoResults) -> str:
    counts = results.verdict_counts()
    honest = counts["honest_accepted"] + counts["honest_rejected"]
    words = f"{counts['honest_accepted']} of {honest} honest updates were accepted"
    if results.bad:
        bad = counts["malfunctioning_accepted"] + counts["malfunctioning_rejected"]
        words += f", {counts['malfunctioning_rejected']} of {bad} malfunctioning ones rejected"
    return words + "."


def rounds_done(info: FederationInfo, statuses: Statuses) -> int:
    """The number of rounds that all sites have completed."""
    return min((_rounds_at(info, statuses.get(name)) for name in info.sites), default=0)


def malfunction_text(malfunction: str) -> str:
    """What a malfunctioning site sends."""
    return MALFUNCTIONS.get(malfunction, malfunction)


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes everything")


def short_names(names: Sequence[PeerName]) -> dict[PeerName, str]:
    """Names without their common prefix: `site-a` becomes `a`."""
    prefixes = {name.rpartition("-")[0] + "-" for name in names}
    common = prefixes.pop() if len(prefixes) == 1 else ""
    return {name: name.removeprefix(common) for name in names}


class _Lines:
    """For a log file or a pipe: prints changes only."""

    def __init__(self, console: Console, info: FederationInfo) -> None:
        self._console = console
        self._info = info
        self._up = 0
        self._done = 0
        self._began = time.monotonic()

    def update(self, statuses: Statuses) -> None:
        up = sum(status is not None for status in statuses.values())
        if up > self._up:
            self._up = up
            self._print(f"{up} of {len(self._info.sites)} sites are up")
        done = rounds_done(self._info, statuses)
        if done > self._done:
            self._done = done
            known = [status for status in statuses.values() if status]
            self._print(f"{done} of {self._info.rounds} rounds done, {_progress_text(known)}")

    def _print(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._began
        self._console.print(f"{elapsed_s:5.1f} s  {text}", highlight=False, soft_wrap=True)


def _progress_text(statuses: Sequence[Mapping[str, Any]]) -> str:
    scores = [s["metrics"]["merged"][METRIC] for s in statuses if METRIC in s["metrics"]["merged"]]
    text = f"{METRIC} {min(scores):.3f} to {max(scores):.3f}" if scores else f"no {METRIC} yet"
    rejected = Counter(
        (peer["name"], peer["reason"])
        for status in statuses
        for peer in status["peers"]
        if peer["verdict"] == "rejected"
    )
    for (name, reason), count in sorted(rejected.items()):
        text += f"; {name} rejected by {count} ({reason})"
    return text


def _sites(info: FederationInfo, statuses: Statuses) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    table.add_column("site")
    table.add_column("rounds", justify="right", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column(METRIC, justify="right", no_wrap=True)
    table.add_column("what it is doing", ratio=1, no_wrap=True, overflow="ellipsis")
    labels = {name: f"{name} !" if name in info.malfunctions else name for name in info.sites}
    for name in info.sites:
        status = statuses.get(name)
        style = "red" if name in info.malfunctions else ""
        label = NameCell(labels[name], list(labels.values()), style)
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
            f"{_rounds_at(info, status)}/{info.rounds}",
            phase,
            "" if score is None else f"{score:.3f}",
            Text(status["waiting"], "dim"),
        )
    return table


def _site_label(name: PeerName, malfunction: str | None) -> Text:
    if malfunction is None:
        return Text(name)
    return Text(f"{name} (sends {malfunction_text(malfunction)})", "red")


def _matrix(info: FederationInfo, statuses: Statuses, marks: Marks, width: int) -> Table | None:
    """Return None if even marks without numbers do not fit."""
    names = short_names(info.sites)
    share = width // (len(names) + 1)
    if max(map(len, names.values())) + 2 > share >= NAME_WIDTH_MIN + 2:
        fitting = shortened(list(names.values()), share - 2)
        names = {name: fitting[short] for name, short in names.items()}
    widest = max(len(name) for name in names.values()) + 2
    room = (width - widest) / len(names)
    if room < max(BARE_CELL_WIDTH, widest):
        return None
    scored = room >= max(SCORED_CELL_WIDTH, widest)
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("")
    for name in info.sites:
        table.add_column(Text(names[name], _name_style(info, name)), justify="center")
    for judge in info.sites:
        status = statuses.get(judge)
        judged = {peer["name"]: peer for peer in status["peers"]} if status else {}
        cells = [
            Text(marks.own, "dim") if peer == judge else _cell(judged.get(peer), marks, scored)
            for peer in info.sites
        ]
        table.add_row(Text(names[judge], _name_style(info, judge)), *cells)
    return table


def _cell(judged: Mapping[str, Any] | None, marks: Marks, scored: bool) -> Text:
    verdict = judged["verdict"] if judged else None
    if judged is None or verdict is None:
        return Text("")
    mark, style = {
        "accepted": (marks.accepted, "green"),
        "rejected": (marks.rejected, "bold red"),
    }.get(verdict, (marks.missing, "yellow"))
    score = judged["agreement"]
    number = f" {score:.2f}" if scored and score is not None and verdict != "missing" else ""
    return Text(mark + number, style)


def _name_style(info: FederationInfo, name: PeerName) -> str:
    return "red" if name in info.malfunctions else "bold"


def _rounds_at(info: FederationInfo, status: Mapping[str, Any] | None) -> int:
    if status is None:
        return 0
    return info.rounds if status["finished"] else min(status["round"], info.rounds)


def _traffic(statuses: Statuses) -> str:
    counters = [status["bytes"] for status in statuses.values() if status]
    raw, wire = (sum(one[key] for one in counters) for key in ("raw", "wire"))
    return f"{size(raw)} of weights moved as {size(wire)}" if raw else "no weights moved yet"


def _has_verdicts(statuses: Statuses) -> bool:
    known = [status["peers"] for status in statuses.values() if status]
    return any(peer["verdict"] for peers in known for peer in peers)
