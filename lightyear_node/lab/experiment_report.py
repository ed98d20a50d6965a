"""Writes the report of an experiment: tables, figures and one self-contained page.

Deterministic: the same folder gives the same bytes.  Everything that comes from a file is escaped.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightyear_node.errors import ConfigError
from lightyear_node.lab import acceptance_table, html, table_formats
from lightyear_node.lab.figures import Drawing, drawings
from lightyear_node.lab.paper_numbers import CAVEAT
from lightyear_node.lab.plot_style import DARK, LIGHT, as_png, as_svg
from lightyear_node.lab.results_reader import Experiment, read
from lightyear_node.lab.tables import LONG_COLUMNS, Chapter, chapters, long_rows
from lightyear_node.storage.atomic_files import write_file

PAGE_NAME = "report.html"
FIGURES_NAME = "figures"


_MORE_STYLE = """
h3 { margin: 1.6rem 0 .3rem; font-size: 1rem; }
figure { margin: 1.4rem 0 0; }
figure img { min-width: 44rem; }
figcaption { color: var(--faint); font-size: .92rem; max-width: 48rem; margin-top: .4rem; }
details { margin: .5rem 0; }
summary { cursor: pointer; font-weight: 500; }
pre { overflow-x: auto; font-size: .85rem; border: 1px solid var(--line); padding: .8rem; }
td, .numbers td { white-space: nowrap; }
.words td, .words tbody th { white-space: normal; overflow-wrap: anywhere; }
@media (max-width: 40rem) { main { padding: 1.5rem 1rem 3rem; } h1 { font-size: 1.5rem; } }
"""


def write_report(directory: Path) -> Path:
    """Read the results in the folder; write tables, figures and the page into it."""
    experiment = read(directory)
    parts = chapters(experiment)
    parts += filter(None, [acceptance_table.chapter(experiment.acceptance)])
    pictures = drawings(experiment)
    # Everything is drawn before anything is written: without matplotlib the folder is unchanged.
    drawn = [(one, one.draw(LIGHT), as_svg(one.draw(DARK))) for one in pictures]
    figures = directory / FIGURES_NAME
    try:
        figures.mkdir(exist_ok=True)
        note = experiment.incomplete
        write_file(directory / "table.md", table_formats.markdown(parts, note).encode())
        write_file(directory / "table.tex", table_formats.latex(parts, note).encode())
        long = table_formats.comma_separated(LONG_COLUMNS, long_rows(experiment))
        write_file(directory / "table.csv", long.encode())
        shown = []
        for one, light, dark in drawn:
            svg = as_svg(light)
            write_file(figures / f"{one.name}.png", as_png(light))
            write_file(figures / f"{one.name}.svg", svg)
            shown.append((one, svg, dark))
        path = directory / PAGE_NAME
        write_file(path, page(experiment, parts, shown).encode())
    except OSError as problem:
        raise ConfigError(
            f"{directory}: the report cannot be written there: {problem.strerror}",
            hint="free disk space or make it writable, then run 'lightyear-node report DIR'",
        ) from None
    return path


def page(
    experiment: Experiment,
    parts: Sequence[Chapter],
    pictures: Sequence[tuple[Drawing, bytes, bytes]],
) -> str:
    suites = ", ".join(sorted({row.suite for row in experiment.rows if row.suite}))
    name = suites or "experiment"
    content = [
        html.section("What was run", "", _run(experiment)),
        *([_failures(experiment)] if experiment.failures or experiment.unreadable else []),
        *([html.section("Pictures", "", _pictures(pictures))] if pictures else []),
        *(html.section(part.title, part.about, _tables(part)) for part in parts),
    ]
    return (
        f"<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n{html.POLICY}\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='color-scheme' content='light dark'>\n"
        f"<title>{escape(name)}: results</title>\n"
        f"<style>{html.STYLE}{_MORE_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<p class='over'>lightyear-node</p>\n<h1>{escape(name)}: results</h1>\n"
        f"<p class='lead'>{escape(_lead(experiment))}</p>\n"
        + "\n".join(content)
        + "\n</main>\n</body>\n</html>\n"
    )


def _lead(experiment: Experiment) -> str:
    rows = experiment.rows
    tasks = sorted({row.setting.task for row in rows})
    seeds = len({row.seed for row in rows})
    return (
        f"{len(rows)} finished runs on {', '.join(tasks) or 'no task'};"
        f" {seeds} {'seed' if seeds == 1 else 'seeds'};"
        f" {len(experiment.failures)} failed. A malfunctioning client corrupts only what it sends,"
        " so tables give all clients, as the paper does, and the honest ones alone."
        f" {experiment.incomplete}"
    ).rstrip()


def _tables(part: Chapter) -> str:
    return "\n".join(table_formats.html(table) for table in part.tables)


def _failures(experiment: Experiment) -> str:
    lines = [(escape(one.what), escape(one.message)) for one in experiment.failures]
    note = (
        f"{experiment.unreadable} torn line(s) of the results could not be read."
        if experiment.unreadable
        else ""
    )
    content = html.table(("job", "message"), lines, kind="words") if lines else ""
    return html.section("What failed", note, content)


def _pictures(pictures: Sequence[tuple[Drawing, bytes, bytes]]) -> str:
    return "\n".join(
        f"<figure><h3>{escape(one.title)}</h3>"
        "<div class='wide'><picture>"
        f"<source media='(prefers-color-scheme: dark)' srcset='{_inline(dark)}'>"
        f"<img src='{_inline(light)}' alt='{escape(one.title)}'></picture></div>"
        f"<figcaption>{escape(one.sentence)}</figcaption></figure>"
        for one, light, dark in pictures
    )


def _inline(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def _run(experiment: Experiment) -> str:
    """The manifest as a table, and the text of the suite."""
    manifest = experiment.manifest
    seconds = sum(row.seconds for row in experiment.rows)
    lines = [(escape(key), escape(value)) for key, value in _flat(manifest)]
    lines.append(("seconds of all runs together", f"{seconds:.0f}"))
    texts = "".join(
        f"<details><summary>{escape(key)}</summary><pre>{escape(text)}</pre></details>"
        for key, text in _texts(manifest)
    )
    paper = f"<p class='note'>{escape(CAVEAT)}</p>"
    return html.table((), lines, kind="words") + texts + paper


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\n" in value


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    lines = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping):
            lines += _flat(item, f"{name}, ")
        elif isinstance(item, Sequence) and not isinstance(item, str):
            lines.append((name, ", ".join(str(one) for one in item)))
        elif not _is_text(item):
            lines.append((name, str(item)))
    return lines


def _texts(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Multi-line values, such as the suite file, which do not fit a table."""
    found = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            found += _texts(item, f"{prefix}{key}, ")
        elif _is_text(item):
            found.append((f"{prefix}{key}", item))
    return found
