"""The report of a demo: a page, a figure and the numbers, in one folder.

The page is self-contained: figures are embedded, there is no script and no request.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightyear_node.errors import ConfigError
from lightyear_node.lab.demo_plot import draw, headline_and_detail
from lightyear_node.lab.demo_results import DemoResults, PeerJudgement
from lightyear_node.lab.federation_view import METRIC, malfunction_text, short_names, size
from lightyear_node.lab.html import POLICY, STYLE, picture, section, table
from lightyear_node.lab.plot_style import DARK, LIGHT
from lightyear_node.types import PeerName, Reason

PAGE_NAME = "report.html"
PICTURE_NAME = "report.png"
NUMBERS_NAME = "results.json"

REASONS = {
    Reason.OK: "accepted: close enough, in agreement, low loss",
    Reason.CAUGHT_UP: "far ahead of us: replaces our model",
    Reason.TOO_FAR: "its weights are farther from ours than a round of training explains",
    Reason.AGREEMENT_BELOW_TAU: "the agreement on our data is below τ",
    Reason.LOSS_REGRET: "its loss on our data is far above that of our own model",
    Reason.NONFINITE: "it contains numbers that are not finite",
    Reason.DOMAIN: "it contains a negative variance",
    Reason.UNSCORED: "it could not be judged",
}

History = Mapping[PeerName, Sequence[Mapping[str, Any]]]


def create_folder(folder: Path) -> None:
    """Create the folder of the report, before the work starts."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(
            f"{folder}: the report cannot be written there: {problem.strerror}",
            hint="name another folder with --keep",
        ) from None


def write(results: DemoResults, history: History) -> None:
    """Write the page, the figure and the numbers into the folder of `results.report`."""
    folder = results.report.parent
    light, dark = draw(results, LIGHT), draw(results, DARK)
    (folder / PICTURE_NAME).write_bytes(light)
    (folder / NUMBERS_NAME).write_text(json.dumps(results.to_plain(), indent=2) + "\n")
    results.report.write_text(page(results, history, light, dark), encoding="utf-8")


def page(results: DemoResults, history: History, light: bytes, dark: bytes) -> str:
    headline, detail = headline_and_detail(results)
    sections = [
        section("What each site ends with", _METRIC_NOTE, _sites(results)),
        section("Who accepts whom in the last round", _MATRIX_NOTE, _matrix(results)),
        section("All verdicts", _VERDICT_NOTE, _verdicts(results)),
        section("Round by round", _ROUNDS_NOTE, _rounds(results, history)),
        section("How it was run", "", _settings(results)),
    ]
    return (
        f"<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n{POLICY}\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<meta name='color-scheme' content='light dark'>\n"
        f"<title>{escape(results.federation)}: {escape(headline)}</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<p class='over'>lightyear-node · federation {escape(results.federation)}</p>\n"
        f"<h1>{escape(headline)}</h1>\n<p class='lead'>{escape(detail)}</p>\n"
        f"{picture(light, dark, headline)}\n"
        + "\n".join(sections)
        + "\n</main>\n</body>\n</html>\n"
    )


_METRIC_NOTE = (
    f"The {METRIC} on each site's own test data. A malfunctioning site corrupts only what it sends;"
    " its own model is honest, so it profits from the federation too."
)
_MATRIX_NOTE = "A row judges a column; the number is the agreement of the two models."
_VERDICT_NOTE = (
    "Given by all sites on every other site's delivered updates, over all rounds."
    " The malfunctioning sites judge as honestly as the others."
)
_ROUNDS_NOTE = f"The {METRIC} of each site's merged model."


def _sites(results: DemoResults) -> str:
    rows = [
        (
            _name(results, site.name),
            f"{site.alone:.3f}",
            f"<b>{site.federated:.3f}</b>",
            f"{site.averaged:.3f}",
        )
        for site in results.sites
    ]
    mean = (
        "mean of the honest sites" if results.bad else "mean",
        f"{results.honest_alone:.3f}",
        f"<b>{results.honest_federated:.3f}</b>",
        f"{results.everyone_averaged:.3f}",
    )
    return table(("site", "alone", "federated", "everyone averaged in"), rows, last=mean)


def _matrix(results: DemoResults) -> str:
    names = [site.name for site in results.sites]
    short, last = short_names(names), results.last_round()
    rows = [
        (_name(results, judge), *(_judged(last.get((judge, peer))) for peer in names))
        for judge in names
    ]
    return table(("", *(escape(short[name]) for name in names)), rows, kind="matrix")


def _judged(one: PeerJudgement | None) -> str:
    if one is None:
        return "<span class='none'>·</span>"
    score = "" if one.score is None else f" {one.score:.2f}"
    kind, mark = ("yes", "✓") if one.accepted else ("no", "✗")
    return f"<span class='{kind}' title='{escape(_reason(one.reason))}'>{mark}{score}</span>"


def _verdicts(results: DemoResults) -> str:
    counted = Counter(
        (one.peer in results.bad, one.accepted, one.reason)
        for one in results.judgements
        if one.delivered
    )
    rows = [
        (
            "malfunctioning" if bad else "honest",
            "<span class='yes'>✓ accepted</span>"
            if accepted
            else "<span class='no'>✗ rejected</span>",
            f"{count}",
            f"<code>{escape(reason)}</code> {escape(_reason(reason))}",
        )
        for (bad, accepted, reason), count in sorted(
            counted.items(), key=lambda item: (item[0][0], not item[0][1], -item[1])
        )
    ]
    missing = sum(not one.delivered for one in results.judgements)
    if missing:
        rows.append(("any", "not judged", f"{missing}", "the update did not arrive in time"))
    return table(("update of a site", "verdict", "times", "why"), rows, kind="words")


def _rounds(results: DemoResults, history: History) -> str:
    rows = []
    for number in range(results.rounds):
        cells = []
        for site in results.sites:
            one = next((r for r in history[site.name] if r["round"] == number), None)
            cells.append("–" if one is None else f"{one['merged'][METRIC]:.3f}")
        rows.append((str(number), *cells))
    return table(("round", *(_name(results, site.name) for site in results.sites)), rows)


def _settings(results: DemoResults) -> str:
    bad = ", ".join(escape(name) for name in sorted(results.bad))
    fault = malfunction_text(results.malfunction)
    saved = 100 * (1 - results.wire_bytes / results.raw_bytes) if results.raw_bytes else 0.0
    rows = [
        ("sites", f"{len(results.sites)}, each a daemon and a worker, mutual TLS on loopback"),
        ("rounds", str(results.rounds)),
        ("rule", f"{escape(results.rule)}, τ = {results.tau:g}"),
        (
            "malfunction",
            f"{bad}: {escape(fault)}" if bad else "none",
        ),
        ("seed", str(results.seed)),
        (
            "weights fetched",
            f"{size(results.raw_bytes)}, as {size(results.wire_bytes)} on the wire"
            f" ({saved:.0f} % less)",
        ),
        ("time", f"{results.seconds:.0f} s, comparisons included"),
    ]
    return table((), rows, kind="words")


def _reason(reason: str) -> str:
    known = {str(key): text for key, text in REASONS.items()}
    return known.get(reason, reason.replace("_", " "))


def _name(results: DemoResults, name: PeerName) -> str:
    if name not in results.bad:
        return escape(name)
    return f"<span class='bad'>{escape(name)}</span>"
