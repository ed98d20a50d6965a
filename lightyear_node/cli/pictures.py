"""A running node's status for people's eyes: at once, or drawn anew while it changes.

Handed what the node said; asks nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Status = Mapping[str, Any]

MARKS = {"accepted": "✓ accepted", "rejected": "✗ rejected", "missing": "– missing"}
STYLES = {"accepted": "green", "rejected": "red", "missing": "yellow"}
JOBS = {"train": "training", "judge": "judging", "merge": "merging"}
BAR_WIDTH = 30


def headline(status: Status) -> str:
    round = min(status["round"] + 1, status["rounds"])
    paused = ", paused" if status.get("paused") else ""
    return (
        f"{status['name']} in {status['federation']}:"
        f" round {round} of {status['rounds']}, {status['phase']}{paused}"
    )


def picture(status: Status, *, bars: bool = False) -> Iterator[RenderableType]:
    """Everything of interest, from the most important down."""
    from rich.text import Text

    name, _, rest = headline(status).partition(":")
    yield Text(name, "bold").append(f":{rest}", "not bold")
    yield Text(status["waiting"])
    for mark in ("blocked", "quarantined"):
        if status.get(mark):
            yield Text(f"{mark}: {', '.join(status[mark])}", "red")
    for problem in status["problems"]:
        yield Text(f"NOT READY: {problem}", "red")
    yield from under_way(status, bars=bars)
    yield _peers(status)
    if status["harm"] and status["harm"]["dropped"]:
        from lightyear_node.records import Harm

        harm = Harm.from_plain(status["harm"])
        yield Text(f"last round: {harm.in_words()}", "yellow")
    moved = status["bytes"]
    yield Text(
        f"received {_mib(moved['wire'])} for {_mib(moved['raw'])} of weights,"
        f" sent {_mib(moved['wire_sent'])};"
        f" our certificate ends on {status['certificate_expires'][:10]}",
    )


def under_way(status: Status, *, bars: bool) -> Iterator[RenderableType]:
    """What takes a while: how far, how fast, how long yet."""
    from lightyear_node.observe.words import progress_words

    work = status["work"]
    if work:
        yield _progress(JOBS.get(work["job"], work["job"]), work, progress_words(work), bars)
    for transfer in status["transfers"]:
        words = progress_words(transfer, weights=True)
        yield _progress(f"from {transfer['peer']}", transfer, words, bars)


def _progress(name: str, pace: Mapping[str, Any], words: str, bars: bool) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    share = f"{100 * pace['done'] // max(pace['total'], 1)} %"
    if not bars:
        return Text(f"{name}: {share}, {words}")
    line = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(pace["total"], 1), completed=pace["done"], width=BAR_WIDTH)
    line.add_row(Text(f"{name:<16}"), bar, Text(f"{share:>5}"), Text(words, "dim"))
    return line


def _peers(status: Status) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("peer", "state", "round", "verdict", "reason", "agreement", box=None)
    for peer in status["peers"]:
        verdict = peer["verdict"]
        table.add_row(
            peer["name"],
            Text(state_words(peer)),
            "" if peer["round"] is None else str(peer["round"]),
            Text(MARKS.get(verdict, ""), STYLES.get(verdict, "")),
            peer["reason"] or "",
            agreement_words(peer, status["threshold"]),
        )
    return table


def state_words(peer: Mapping[str, Any]) -> str:
    words = [peer["state"] + (f": {peer['about']}" if peer["about"] else "")]
    words += [f"left out {peer['left_out']} times"] if peer["left_out"] else []
    words += [peer["differs"]] if peer["differs"] else []
    words += [f"of ours it says: {peer['opinion']}"] if peer["opinion"] else []
    return "; ".join(words)


def agreement_words(peer: Mapping[str, Any], threshold: float | None) -> str:
    if peer["agreement"] is None:
        return ""
    against = "" if threshold is None else f" (τ {threshold:.2f})"
    return f"{peer['agreement']:.3f}{against}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
