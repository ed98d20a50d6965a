"""What remains of a demonstration: a page, a picture and the numbers, in one folder.

The page needs nothing else: the pictures are inside it, it runs no script and asks no server.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightyear_node.errors import ConfigError
from lightyear_node.lab.ink import DARK, LIGHT
from lightyear_node.lab.markup import POLICY, STYLE, picture, section, table
from lightyear_node.lab.plot import draw, in_words
from lightyear_node.lab.results import Judgement, Results
from lightyear_node.lab.view import METRIC, in_short, short_names, size
from lightyear_node.records import PeerName, Reason

PAGE_NAME = "report.html"
PICTURE_NAME = "report.png"
NUMBERS_NAME = "results.json"

REASONS = {
    Reason.OK: "fits: close enough, sees alike, does well",
    Reason.CAUGHT_UP: "far ahead of us: taken over in place of ours",
    Reason.TOO_FAR: "its weights are farther from ours than a round of training explains",
    Reason.AGREEMENT_BELOW_TAU: "it sees our data differently: the agreement is below τ",
    Reason.LOSS_REGRET: "it does far worse on our data than our own model",
    Reason.NONFINITE: "it contains numbers that are not finite",
    Reason.DOMAIN: "it contains a negative variance",
    Reason.UNSCORED: "it could not be judged",
}

History = Mapping[PeerName, Sequence[Mapping[str, Any]]]


def make_room(folder: Path) -> None:
    """Before the work whose result is to be put there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(
            f"{folder}: the report cannot be put there: {problem.strerror}",
            hint="name another folder with --keep",
        ) from None


def write(results: Results, history: History) -> None:
    """The page, the picture and the numbers, beside each other where `results.report` says."""
    folder = results.report.parent
    light, dark = draw(results, LIGHT), draw(results, DARK)
    (folder / PICTURE_NAME).write_bytes(light)
    (folder / NUMBERS_NAME).write_text(json.dumps(results.to_plain(), indent=2) + "\n")
    results.report.write_text(page(results, history, light, dark), encoding="utf-8")


def page(results: Results, history: History, light: bytes, dark: bytes) -> str:
    headline, detail = in_words(results)
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


def _sites(results: Results) -> str:
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


def _matrix(results: Results) -> str:
    names = [site.name for site in results.sites]
    short, last = short_names(names), results.last_round()
    rows = [
        (_name(results, judge), *(_judged(last.get((judge, peer))) for peer in names))
        for judge in names
    ]
    return table(("", *(escape(short[name]) for name in names)), rows, kind="matrix")


def _judged(one: Judgement | None) -> str:
    if one is None:
        return "<span class='none'>·</span>"
    score = "" if one.score is None else f" {one.score:.2f}"
    kind, mark = ("yes", "✓") if one.accepted else ("no", "✗")
    return f"<span class='{kind}' title='{escape(_reason(one.reason))}'>{mark}{score}</span>"


def _verdicts(results: Results) -> str:
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
        rows.append(("any", "not judged", f"{missing}", "the update was not there in time"))
    return table(("update of a site", "verdict", "times", "why"), rows, kind="words")


def _rounds(results: Results, history: History) -> str:
    rows = []
    for number in range(results.rounds):
        cells = []
        for site in results.sites:
            one = next((r for r in history[site.name] if r["round"] == number), None)
            cells.append("–" if one is None else f"{one['merged'][METRIC]:.3f}")
        rows.append((str(number), *cells))
    return table(("round", *(_name(results, site.name) for site in results.sites)), rows)


def _settings(results: Results) -> str:
    bad = ", ".join(escape(name) for name in sorted(results.bad))
    saved = 100 * (1 - results.wire_bytes / results.raw_bytes) if results.raw_bytes else 0.0
    rows = [
        ("sites", f"{len(results.sites)}, each a daemon and a worker, mutual TLS on loopback"),
        ("rounds", str(results.rounds)),
        ("rule", f"{escape(results.rule)}, τ = {results.tau:g}"),
        ("malfunction", f"{bad}: {escape(in_short(results.malfunction))}" if bad else "none"),
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


def _name(results: Results, name: PeerName) -> str:
    if name not in results.bad:
        return escape(name)
    return f"<span class='bad'>{escape(name)}</span>"
