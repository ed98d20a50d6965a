"""An experiment's results for people: tables, pictures and one page that needs nothing else.

The same folder gives the same bytes again: nothing here reads a clock, and no order is left to
chance.  Everything that comes from a file is escaped.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightyear_node.errors import ConfigError
from lightyear_node.lab import markup, messages_table, typeset
from lightyear_node.lab.figures import Drawing, drawings
from lightyear_node.lab.ink import DARK, LIGHT, as_png, as_svg
from lightyear_node.lab.paper import CAVEAT
from lightyear_node.lab.rows import Experiment, read
from lightyear_node.lab.tables import LONG_COLUMNS, Chapter, chapters, long_rows

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


def publish(directory: Path) -> Path:
    """Reads what is in the folder and writes tables, pictures and the page into it."""
    experiment = read(directory)
    parts = chapters(experiment)
    parts += filter(None, [messages_table.chapter(experiment.acceptance)])
    pictures = drawings(experiment)
    # All is drawn before anything is written: without matplotlib the folder stays as it was.
    drawn = [(one, one.draw(LIGHT), as_svg(one.draw(DARK))) for one in pictures]
    figures = directory / FIGURES_NAME
    try:
        figures.mkdir(exist_ok=True)
        _put(directory / "table.md", typeset.markdown(parts).encode())
        _put(directory / "table.tex", typeset.latex(parts).encode())
        long = typeset.comma_separated(LONG_COLUMNS, long_rows(experiment))
        _put(directory / "table.csv", long.encode())
        shown = []
        for one, light, dark in drawn:
            svg = as_svg(light)
            _put(figures / f"{one.name}.png", as_png(light))
            _put(figures / f"{one.name}.svg", svg)
            shown.append((one, svg, dark))
        path = directory / PAGE_NAME
        _put(path, page(experiment, parts, shown).encode())
    except OSError as problem:
        raise ConfigError(
            f"{directory}: the report cannot be written there: {problem.strerror}",
            hint="make room, or the folder writable, and run 'lightyear-node report DIR'",
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
        markup.section("What was run", "", _run(experiment)),
        *([_failures(experiment)] if experiment.failures or experiment.unreadable else []),
        *([markup.section("Pictures", "", _pictures(pictures))] if pictures else []),
        *(markup.section(part.title, part.about, _tables(part)) for part in parts),
    ]
    return (
        f"<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n{markup.POLICY}\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        "<meta name='color-scheme' content='light dark'>\n"
        f"<title>{escape(name)}: results</title>\n"
        f"<style>{markup.STYLE}{_MORE_STYLE}</style>\n</head>\n<body>\n<main>\n"
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
    )


def _tables(part: Chapter) -> str:
    return "\n".join(typeset.html(table) for table in part.tables)


def _failures(experiment: Experiment) -> str:
    lines = [(escape(one.what), escape(one.message)) for one in experiment.failures]
    note = (
        f"{experiment.unreadable} torn line(s) of the results could not be read."
        if experiment.unreadable
        else ""
    )
    content = markup.table(("job", "message"), lines, kind="words") if lines else ""
    return markup.section("What failed", note, content)


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
    """The manifest, flattened; the suite as it was written."""
    manifest = experiment.manifest
    seconds = sum(row.seconds for row in experiment.rows)
    lines = [(escape(key), escape(value)) for key, value in _flat(manifest)]
    lines.append(("seconds of all runs together", f"{seconds:.0f}"))
    texts = "".join(
        f"<details><summary>{escape(key)}</summary><pre>{escape(text)}</pre></details>"
        for key, text in _texts(manifest)
    )
    paper = f"<p class='note'>{escape(CAVEAT)}</p>"
    return markup.table((), lines, kind="words") + texts + paper


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
    """Whole files, such as the suite's: shown as they are, not in a table's cell."""
    found = []
    for key, item in value.items():
        if isinstance(item, Mapping):
            found += _texts(item, f"{prefix}{key}, ")
        elif _is_text(item):
            found.append((f"{prefix}{key}", item))
    return found


def _put(path: Path, content: bytes) -> None:
    """All of it or nothing: a reader never sees half a file."""
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(content)
    os.replace(beside, path)
