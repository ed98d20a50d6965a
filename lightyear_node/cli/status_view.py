"""Renders a node's status as text and tables.  Does no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Status = Mapping[str, Any]

FATES = {
    "accepted": ("✓ accepted", "green"),
    "rejected": ("✗ rejected", "red"),
    "missing": ("– missing", "yellow"),
}
"""The text and the style of each verdict."""
JOBS = {"train": "training", "judge": "judging", "merge": "merging"}
BAR_WIDTH = 30


def headline(status: Status) -> str:
    if status.get("starting"):
        return f"{status['name']} in {status['federation']}: starting"
    done = min(status["round"], status["rounds"])
    paused = ", paused" if status.get("paused") else ""
    return (
        f"{status['name']} in {status['federation']}:"
        f" {done} of {status['rounds']} rounds done, {status['phase']}{paused}"
    )


def render_status(status: Status, *, bars: bool = False) -> Iterator[RenderableType]:
    """Yield the parts of the status, most important first."""
    from rich.text import Text

    name, _, rest = headline(status).partition(":")
    yield Text(name, "bold").append(f":{rest}", "not bold")
    yield Text(status["waiting"])
    for topic in ("blocked", "quarantined"):
        if status.get(topic):
            yield Text(f"{topic}: {', '.join(status[topic])}", "red")
    for problem in status["problems"]:
        yield Text(f"NOT READY: {problem}", "red")
    yield from _progress_lines(status, bars=bars)
    yield _peer_table(status)
    if status["harm"] and status["harm"]["dropped"]:
        from lightyear_node.types import Harm

        harm = Harm.from_plain(status["harm"])
        yield Text(f"last round: {harm.description()}", "yellow")
    if status.get("worth"):
        from lightyear_node.types import Worth

        worth = Worth.from_plain(status["worth"])
        yield Text(f"last round: {worth.description()}")
    transferred = status["bytes"]
    yield Text(
        f"received {_mib(transferred['wire'])} for {_mib(transferred['raw'])} of weights,"
        f" sent {_mib(transferred['wire_sent'])};"
        f" our certificate expires on {status['certificate_expires'][:10]}",
    )


def _progress_lines(status: Status, *, bars: bool) -> Iterator[RenderableType]:
    """Yield a line for the current job and for each transfer: progress, rate, time left."""
    from lightyear_node.observe.progress import progress_text

    work = status["work"]
    if work:
        yield _progress(JOBS.get(work["job"], work["job"]), work, progress_text(work), bars)
    for transfer in status["transfers"]:
        words = progress_text(transfer, weights=True)
        yield _progress(f"from {transfer['peer']}", transfer, words, bars)


def _progress(name: str, job: Mapping[str, Any], text: str, bars: bool) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    share = f"{100 * job['done'] // max(job['total'], 1)} %"
    if not bars:
        return Text(f"{name}: {share}, {text}")
    line = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(job["total"], 1), completed=job["done"], width=BAR_WIDTH)
    line.add_row(Text(f"{name:<16}"), bar, Text(f"{share:>5}"), Text(text, "dim"))
    return line


def _peer_table(status: Status) -> Table:
    from rich.table import Table
    from rich.text import Text

    from lightyear_node.observe.short_names import NameCell

    names = [peer["name"] for peer in status["peers"]]
    table = Table("peer", "state", "round", "verdict", "reason", "agreement", box=None)
    for peer in status["peers"]:
        table.add_row(
            NameCell(peer["name"], names),
            Text(state_text(peer)),
            "" if peer["round"] is None else str(peer["round"]),
            Text(*FATES.get(peer["verdict"], ("", ""))),
            peer["reason"] or "",
            agreement_text(peer, status["threshold"]),
        )
    return table


def state_text(peer: Mapping[str, Any]) -> str:
    from lightyear_node.observe.progress import peer_state_text

    parts = [peer_state_text(peer["state"], peer["about"])]
    parts += [f"left out {peer['left_out']} times"] if peer["left_out"] else []
    parts += [peer["differs"]] if peer["differs"] else []
    parts += [f"its verdict on ours: {peer['opinion']}"] if peer["opinion"] else []
    return "; ".join(parts)


def agreement_text(peer: Mapping[str, Any], threshold: float | None) -> str:
    if peer["agreement"] is None:
        return ""
    against = "" if threshold is None else f" (τ {threshold:.2f})"
    return f"{peer['agreement']:.3f}{against}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
