"""`status --watch`: looks at a node again and again, whether it is there or not.

On a terminal one picture that is drawn anew; elsewhere, and for programs, only what has changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lightyear_node.cli.common import Format, console, print_json, print_lines
from lightyear_node.cli.pictures import Status, agreement_words, headline, picture, state_words

if TYPE_CHECKING:
    from rich.console import Console

QUIT = b"q"

Pause = Callable[[], bool]
"""Waits for the time of the next look; False to end."""


@dataclass(frozen=True, slots=True)
class Look:
    status: Status | None
    """None while no node answers."""
    gone_since: datetime | None = None
    about: str = ""
    """Why there is no status."""


def follow(state_dir: Path, format: Format, interval_s: float) -> None:
    from lightyear_node.observe.words import drawable

    out = console()
    if format is Format.TABLE and drawable(out):
        with _keyboard(interval_s) as pause:
            _draw(out, looks(state_dir, pause))
        return
    tell = _tell_people if format is Format.TABLE else _teller(format)
    seen: dict[str, str] = {}
    for look in looks(state_dir, partial(_wait, interval_s)):
        now = facts(look)
        news = {about: words for about, words in now.items() if seen.get(about) != words}
        if news:
            tell(look, news)
        seen = now


def looks(state_dir: Path, pause: Pause) -> Iterator[Look]:
    from lightyear_node.observe.admin import NotRunning, ask

    gone_since: datetime | None = None
    while True:
        try:
            look = Look(ask(state_dir, "status"))
            gone_since = None
        except NotRunning as problem:
            gone_since = gone_since or datetime.now(UTC)
            look = Look(None, gone_since, str(problem))
        yield look
        if not pause():
            return


def facts(look: Look) -> dict[str, str]:
    """What is worth a line when it changes; that time passes is not."""
    status = look.status
    if status is None:
        return {"node": _gone(look)}
    # Counting down is not news, nor is the phase that the headline has named.
    waiting = re.sub(r"[\d.]+ s\b", "… s", re.sub(r"^round \d+: ", "", status["waiting"]))
    more = f", {waiting}" if waiting != status["phase"] else ""
    found = {"node": headline(status) + more}
    for mark in ("blocked", "quarantined", "problems"):
        if status.get(mark):
            name = "NOT READY" if mark == "problems" else mark
            found[mark] = f"{name}: {', '.join(status[mark])}"
    for peer in status["peers"]:
        words = f"{peer['name']}: {state_words(peer)}"
        if peer["verdict"]:
            words += f"; {peer['verdict']} in round {peer['verdict_round']} ({peer['reason']})"
            agreement = agreement_words(peer, status["threshold"])
            words += f", agreement {agreement}" if agreement else ""
        found[f"peer {peer['name']}"] = words
    return found


def _gone(look: Look) -> str:
    assert look.gone_since is not None
    return f"gone since {look.gone_since.astimezone():%H:%M:%S}: {look.about}; waiting for it"


def _tell_people(look: Look, news: Mapping[str, str]) -> None:
    now = datetime.now().astimezone()
    for words in news.values():
        typer.echo(f"{now:%H:%M:%S} {words}")


def _teller(format: Format) -> Callable[[Look, Mapping[str, str]], None]:
    def tell(look: Look, news: Mapping[str, str]) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        data: dict[str, Any] = {"time": now, "running": look.status is not None}
        if look.gone_since is not None:
            data |= {"gone_since": look.gone_since.isoformat(timespec="milliseconds")}
        data |= look.status or {}
        if format is Format.JSON:
            print_json(data)
        else:
            print_lines([data])

    return tell


def _draw(out: Console, looking: Iterator[Look]) -> None:
    from rich.console import Group, RenderableType
    from rich.live import Live
    from rich.text import Text

    last = ""
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as screen:
        for look in looking:
            if look.status is None:
                parts: list[RenderableType] = [Text(_gone(look), "bold yellow"), Text(last)]
            else:
                parts = list(picture(look.status, bars=True))
                last = f"last seen: {headline(look.status)}"
            now = datetime.now().astimezone()
            footer = Text(
                f"{now:%H:%M:%S}   {QUIT.decode()} or Ctrl-C ends this; the node goes on", "dim"
            )
            screen.update(Group(*parts, footer), refresh=True)


def _wait(interval_s: float) -> bool:
    time.sleep(interval_s)
    return True


@contextlib.contextmanager
def _keyboard(interval_s: float) -> Iterator[Pause]:
    """Single keys, without Enter; where nobody types, there is only the time."""
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
            # Past Python's own buffer, of which `select` knows nothing; nothing means a hang-up.
            if ready and os.read(sys.stdin.fileno(), 1) in (QUIT, QUIT.upper(), b""):
                return False
        return True

    try:
        tty.setcbreak(sys.stdin)
        yield pause
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
