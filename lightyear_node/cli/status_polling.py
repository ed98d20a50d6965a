"""`status --watch`: queries a node at intervals, whether or not it runs.

On a terminal a live view; elsewhere, and as JSON, only what has changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lightyear_node.cli.common import Format, console, show
from lightyear_node.cli.status_view import (
    Status,
    agreement_text,
    headline,
    render_status,
    state_text,
)

if TYPE_CHECKING:
    from rich.console import Console

QUIT = b"q"

Pause = Callable[[], bool]
"""Waits until the next query is due; False to end."""


@dataclass(frozen=True, slots=True)
class StatusSample:
    """The result of one query."""

    status: Status | None
    """None while no node answers."""
    gone_since: datetime | None = None
    about: str = ""
    """Why there is no status."""


def watch_status(state_dir: Path, format: Format, interval_s: float) -> None:
    from lightyear_node.observe.progress import can_redraw

    out = console()
    if format is Format.TABLE and can_redraw(out):
        with _keyboard(interval_s) as pause:
            _draw(out, samples(state_dir, pause))
        return
    shown: dict[str, str] = {}
    for sample in samples(state_dir, partial(_wait, interval_s)):
        current = facts(sample)
        changes = [text for topic, text in current.items() if shown.get(topic) != text]
        if changes:
            show(format, _plain(sample), partial(_print_changes, changes))
        shown = current


def samples(state_dir: Path, pause: Pause) -> Iterator[StatusSample]:
    """Query the node until `pause` returns False."""
    from lightyear_node.observe.admin_socket import NotRunning, ask

    gone_since: datetime | None = None
    while True:
        try:
            sample = StatusSample(ask(state_dir, "status"))
            gone_since = None
        except NotRunning as problem:
            gone_since = gone_since or datetime.now(UTC)
            sample = StatusSample(None, gone_since, str(problem))
        yield sample
        if not pause():
            return


def facts(sample: StatusSample) -> dict[str, str]:
    """One line for the node and for each peer; a line that changes is printed again."""
    status = sample.status
    if status is None:
        return {"node": _gone(sample)}
    # Without the countdown, which changes all the time, and the phase, which is in the headline.
    waiting = re.sub(r"[\d.]+ s\b", "… s", re.sub(r"^round \d+: ", "", status["waiting"]))
    more = f", {waiting}" if waiting != status["phase"] else ""
    found = {"node": headline(status) + more}
    for topic in ("blocked", "quarantined", "problems"):
        if status.get(topic):
            name = "NOT READY" if topic == "problems" else topic
            found[topic] = f"{name}: {', '.join(status[topic])}"
    for peer in status["peers"]:
        text = f"{peer['name']}: {state_text(peer)}"
        if peer["verdict"]:
            text += f"; {peer['verdict']} in round {peer['verdict_round']} ({peer['reason']})"
            agreement = agreement_text(peer, status["threshold"])
            text += f", agreement {agreement}" if agreement else ""
        found[f"peer {peer['name']}"] = text
    return found


def _gone(sample: StatusSample) -> str:
    assert sample.gone_since is not None
    return f"gone since {sample.gone_since.astimezone():%H:%M:%S}: {sample.about}; waiting for it"


def _print_changes(changes: Iterable[str]) -> None:
    now = datetime.now().astimezone()
    for text in changes:
        typer.echo(f"{now:%H:%M:%S} {text}")


def _plain(sample: StatusSample) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    data: dict[str, Any] = {"time": now, "running": sample.status is not None}
    if sample.gone_since is not None:
        data |= {"gone_since": sample.gone_since.isoformat(timespec="milliseconds")}
    return {**data, **(sample.status or {})}


def _draw(out: Console, found: Iterator[StatusSample]) -> None:
    from rich.console import Group, RenderableType
    from rich.live import Live
    from rich.text import Text

    last = ""
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as screen:
        for sample in found:
            if sample.status is None:
                parts: list[RenderableType] = [Text(_gone(sample), "bold yellow"), Text(last)]
            else:
                parts = list(render_status(sample.status, bars=True))
                last = f"last seen: {headline(sample.status)}"
            now = datetime.now().astimezone()
            footer = Text(
                f"{now:%H:%M:%S}   {QUIT.decode()} or Ctrl-C ends this view, not the node", "dim"
            )
            screen.update(Group(*parts, footer), refresh=True)


def _wait(interval_s: float) -> bool:
    time.sleep(interval_s)
    return True


@contextlib.contextmanager
def _keyboard(interval_s: float) -> Iterator[Pause]:
    """Read single keys without Enter; without a terminal, only wait."""
    if not sys.stdin.isatty():
        yield partial(_wait, interval_s)
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def pause() -> bool:
        until = time.monotonic() + interval_s
        while (left_s := until - time.monotonic()) > 0:
            ready, _, _ = select.select([sys.stdin], [], [], left_s)
            # Unbuffered, because `select` does not see Python's buffer; b"" is a hang-up.
            if ready and os.read(sys.stdin.fileno(), 1) in (QUIT, QUIT.upper(), b""):
                return False
        return True

    try:
        tty.setcbreak(sys.stdin)
        yield pause
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
