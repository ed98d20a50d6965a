"""`rounds` and `explain`: rounds from the journal, whether or not the node runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightyear_node.cli import app, rounds_app
from lightyear_node.cli.common import (
    Format,
    FormatOption,
    HomeOption,
    console,
    examples,
    show,
    state_dir_of,
)
from lightyear_node.cli.completion import peer_names, round_numbers
from lightyear_node.cli.status_view import FATES

if TYPE_CHECKING:
    from rich.console import Console

    from lightyear_node.audit.rounds import RoundEntry


@rounds_app.command("list", epilog=examples("lightyear-node rounds list"))
def list_rounds(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """List the recorded rounds: when and how each ended, and how many updates were merged."""
    entries = [entry.summary() for entry in recorded(home).values()]
    show(format, entries, lambda: _list(entries), rows=entries)


@rounds_app.command("show", epilog=examples("lightyear-node rounds show 7"))
def show_round(
    number: Annotated[
        int,
        typer.Argument(help="The round, counted from 0.", min=0, autocompletion=round_numbers),
    ],
    home: HomeOption = Path(),
    format: FormatOption = Format.TABLE,
) -> None:
    """Show one round: our own update, every peer's verdict, and what was merged."""
    from lightyear_node.audit.rounds import find_round

    entry = find_round(recorded(home), number)
    show(format, entry.to_plain(), lambda: _show(console(), entry))


@app.command(epilog=examples("lightyear-node explain --round 7 --peer site-b"))
def explain(
    round: Annotated[
        int,
        typer.Option(
            "--round", help="The round, counted from 0.", min=0, autocompletion=round_numbers
        ),
    ],
    peer: Annotated[
        str,
        typer.Option(
            "--peer", help="The site, by its name in peers.yaml.", autocompletion=peer_names
        ),
    ],
    home: HomeOption = Path(),
    format: FormatOption = Format.TABLE,
) -> None:
    """Explain why a peer's update was used in a round or not: each measurement and its limit."""
    from lightyear_node.audit.rounds import explain_verdict, find_round

    data = explain_verdict(find_round(recorded(home), round), peer)
    show(format, data, lambda: _explain(console(), data))


def recorded(home: Path) -> dict[int, RoundEntry]:
    """Return the rounds of the journal up to the first record that does not verify."""
    from lightyear_node.audit.export import open_records, valid_rows
    from lightyear_node.audit.rounds import rounds_of

    with open_records(state_dir_of(home)) as source:
        rows, bad = valid_rows(source)
    if bad is not None:
        typer.echo(
            f"record {bad.seq} does not fit the one before it: later records are left out;"
            " run `lightyear-node audit verify`",
            err=True,
        )
    return rounds_of(rows)


def _list(entries: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table

    table = Table("round", "time", "state", "closed", "✓", "✗", "–", "model", box=None)
    table.add_column("before → after merging")
    for entry in entries:
        names = ("round", "time", "state", "cause", "accepted", "rejected", "missing")
        cells = ["" if entry[name] is None else str(entry[name]) for name in names]
        table.add_row(*cells, (entry["model"] or "")[:12], change_of(entry))
    console().print(table)


def _show(console: Console, entry: RoundEntry) -> None:
    from rich.table import Table
    from rich.text import Text

    from lightyear_node.audit.rounds import merge_text

    data = entry.to_plain()
    title(console, f"round {data['round']}", f"{data['state']}, {data['time']}")
    update = data["update"] or {}
    line(console, "our update", f"{update.get('digest', 'not sealed yet')}")
    if data["why"]:
        line(console, "closed", f"{data['why']} ({data['cause']})")
    for words in merge_text(entry):
        line(console, "merge", words)
    line(console, "our model", change_of(data))
    line(console, "model", data["model"] or "not merged yet")
    table = Table("peer", "verdict", "reason", "score", "weight", "update", box=None)
    for verdict in data["verdicts"]:
        table.add_row(
            Text(verdict["peer"]),
            Text(*FATES[verdict["fate"]]),
            verdict["reason"],
            number(verdict["score"]),
            f"{verdict['weight']:.3f}",
            (verdict["digest"] or "")[:12],
        )
    console.print(table)
    for other in data["others"]:
        line(console, other["kind"], f"record {other['seq']}: {record_text(other)}")


def record_text(record: Mapping[str, Any]) -> str:
    """A record in one line; `--format json` shows all of it."""
    body = record["body"]
    if record["kind"] == "witness":
        heard = [one.get("manifest", {}).get("update", {}) for one in body.get("updates", [])]
        news = [f"{one.get('peer')}'s update of round {one.get('round')}" for one in heard]
        return f"we have heard of {', '.join(news) or 'nothing new'}"
    return ", ".join(f"{key} {value}" for key, value in body.items())


def _explain(console: Console, data: Mapping[str, Any]) -> None:
    from rich.text import Text

    mark, colour = FATES[data["fate"]]
    title(console, f"round {data['round']}, {data['peer']}:", "")
    console.print(Text(f"  {mark} ({data['reason']})", style=colour))
    line(console, "why", data["about"])
    line(console, "what to do", data["advice"])
    line(console, "score", number(data["score"]) or "none: it was not measured")
    line(console, "threshold", number(data["threshold"]) or "none")
    print_guard(console, data["guard"])
    line(console, "weight", f"{data['weight']:.4f} of the merged model")
    update = data["digest"] or "none was here"
    if data["update_round"] is not None:
        update += f" (generation {data['generation']}, round {data['update_round']})"
    line(console, "update", update)
    line(console, "closed", f"{data['why']}: {data['cause_about']}")
    for words in data["merge"]:
        line(console, "merge", words)
    line(console, "our model", change_of(data))
    line(console, "model", data["model"] or "not merged yet")
    records = ", ".join(f"{kind} {seq}" for kind, seq in data["records"].items())
    line(console, "records", f"{records}; {data['time']}")


def print_guard(console: Console, checks: Sequence[Mapping[str, Any]]) -> None:
    """Print each measurement and its limit."""
    for check in checks:
        limit = ""
        if check["limit"] is not None:
            limit = f", {'at most' if check['at_most'] else 'at least'} {number(check['limit'])}"
        sign = {True: " ✓", False: " ✗", None: ""}[check["holds"]]
        words = f"{number(check['value'])}{limit}{sign}   {check['meaning']}"
        line(console, check["name"], words)


def title(console: Console, name: str, about: str) -> None:
    from rich.text import Text

    console.print(Text(name, style="bold").append(f" {about}".rstrip(), style="not bold"))


def line(console: Console, name: str, words: str) -> None:
    from rich.text import Text

    console.print(
        Text(f"  {name:<11} ", style="dim").append(words, style="not dim"), soft_wrap=True
    )


def change_of(data: Mapping[str, Any]) -> str:
    """Each of our metrics before and after merging."""
    before, after = data["before"], data["after"]
    names = dict.fromkeys((*before, *after))
    pairs = ((name, number(before.get(name)), number(after.get(name))) for name in names)
    return ", ".join(f"{name} {old or '?'} → {new or '?'}" for name, old, new in pairs)


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
