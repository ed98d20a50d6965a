"""`check` and `peers ping`: is this site ready, and why can it not talk to that one?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightyear_node.cli import EXIT_UNHEALTHY, app, peers_app
from lightyear_node.cli.common import (
    Format,
    FormatOption,
    HomeOption,
    PeersOption,
    examples,
    show,
    unknown_peer,
)
from lightyear_node.cli.complete import peer_names
from lightyear_node.records import Check, Mark, PeerName

if TYPE_CHECKING:
    from rich.text import Text

    from lightyear_node.home import Home
    from lightyear_node.preflight import OurModel
    from lightyear_node.transport.diagnose import Diagnosis

_SIGNS = {
    Mark.HOLDS: ("✓", "green"),
    Mark.DIFFERS: ("!", "yellow"),
    Mark.BROKEN: ("✗", "red"),
    Mark.NOT_REACHED: ("–", "dim"),
    Mark.NOT_KNOWN: ("–", "dim"),
}
_HEADINGS = {
    "dns": "DNS",
    "tcp": "TCP",
    "tls": "TLS",
    "accepted": "ours",
    "agreement": "peers.yaml",
    "initial_model": "start",
}
"""Of the columns; the others bear their link's own name."""
_NOT_KNOWN = (
    "schema and start are not known here: no node has run in this folder yet;"
    " `lightyear-node check` builds the model and compares them"
)

TimeoutOption = Annotated[
    float, typer.Option(help="Seconds to wait for each step of a connection.", min=0.1, max=60)
]


@app.command(
    epilog=examples("lightyear-node check", "lightyear-node check --no-model --timeout 10")
)
def check(
    home: HomeOption = Path(),
    peers: PeersOption = Path("peers.yaml"),
    no_model: Annotated[
        bool, typer.Option("--no-model", help="Do not build the model: quick, compares less.")
    ] = False,
    timeout: TimeoutOption = 5.0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Look for everything that could keep this site from working, and say what to do about it.

    Changes nothing, here or at the peers; a node may be running.  Ends with 3 if something is
    broken.
    """
    import asyncio

    page = _Page(format)
    try:
        asyncio.run(_check(page, home, peers, build=not no_model, timeout_s=timeout))
    finally:
        page.close()
    page.end()


@peers_app.command(
    "ping", epilog=examples("lightyear-node peers ping", "lightyear-node peers ping site-b")
)
def ping(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Sites to ask; everybody when none is named.", autocompletion=peer_names
        ),
    ] = None,
    home: HomeOption = Path(),
    peers: PeersOption = Path("peers.yaml"),
    timeout: TimeoutOption = 5.0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Ask other sites whether they can be reached and fit, link by link; they go on undisturbed.

    Ends with 3 if a link is broken.
    """
    import asyncio
    from datetime import UTC, datetime

    from lightyear_node.home import load_home
    from lightyear_node.preflight import remembered_model

    now = datetime.now(UTC)
    settings = load_home(home, peers, environment=os.environ, flags={}, now=now)
    wanted = _chosen(settings, peers, names or [])
    model = remembered_model(settings)
    page = _Page(format)
    try:
        asyncio.run(_ask(page, settings, wanted, model, timeout))
    finally:
        page.close()
    page.end()


def _chosen(home: Home, peers: Path, names: Sequence[str]) -> list[PeerName]:
    from lightyear_node.errors import ConfigError

    for name in names:
        if name == home.us:
            raise ConfigError(f"{name} is this site itself", hint="name another, or none for all")
        if name not in home.others:
            raise unknown_peer(str(peers), name, home.others)
    return [peer for peer in home.others if not names or peer in names]


async def _check(page: _Page, folder: Path, peers: Path, *, build: bool, timeout_s: float) -> None:
    from datetime import UTC, datetime

    from lightyear_node.errors import LightyearError
    from lightyear_node.home import load_home
    from lightyear_node.preflight import (
        OurModel,
        failed,
        model_checks,
        port_checks,
        remembered_model,
        settings_checks,
        state_checks,
    )

    now = datetime.now(UTC)
    try:
        home = load_home(folder, peers, environment=os.environ, flags={}, now=now)
    except LightyearError as problem:
        page.add([failed("settings", problem)])
        return
    page.add(settings_checks(home, now))
    page.add(port_checks(home))
    model: OurModel | None = None
    if build:
        page.wait(f"building the model of {home.site.task.entry}")
        checks, model = await model_checks(home)
        page.add(checks)
    else:
        page.add([Check("model", Mark.NOT_REACHED, "not built (--no-model)")])
    page.add(state_checks(home, model))
    if model is None:
        try:
            model = remembered_model(home)
        except LightyearError:  # `state_checks` has said so
            model = OurModel()
    await _ask(page, home, home.others, model, timeout_s)


async def _ask(
    page: _Page, home: Home, peers: Sequence[PeerName], model: OurModel, timeout_s: float
) -> None:
    from datetime import UTC, datetime

    from lightyear_node.preflight import ask_peers

    page.begin_peers(peers)
    now = datetime.now(UTC)
    page.diagnoses = await ask_peers(
        home, peers, model, now=now, timeout_s=timeout_s, tell=page.add_peer
    )


class _Page:
    """What is shown while it is found out; the JSON comes at the end."""

    def __init__(self, format: Format) -> None:
        import sys

        from rich.console import Console

        self._format = format
        # Besides a program that reads JSON, a person at the terminal may still watch.
        aside = format is not Format.TABLE
        self._console = Console(stderr=aside, quiet=aside and not sys.stderr.isatty())
        self._status = self._console.status("")
        self._checks: list[Check] = []
        self._waiting: list[PeerName] = []
        self._name_width = 0
        self.diagnoses: list[Diagnosis] = []

    def wait(self, what: str) -> None:
        """A moving line at a terminal; elsewhere the lines that appear are all."""
        from lightyear_node.observe.words import drawable

        if drawable(self._console):
            self._status.update(f"{what} …")
            self._status.start()

    def close(self) -> None:
        self._status.stop()

    def add(self, checks: Iterable[Check]) -> None:
        from rich.text import Text

        for check in checks:
            self._checks.append(check)
            line = Text("  ").append(*_SIGNS[check.mark]).append(f" {check.name:<12} ")
            self._print(line.append(check.about))
            if check.advice:
                self._print(_advice(check, 17))

    def begin_peers(self, peers: Sequence[PeerName]) -> None:
        from rich.text import Text

        from lightyear_node.transport.diagnose import LINKS

        if not peers:
            self._print(Text("  this site trains alone: there is nobody to ask"))
            return
        self._waiting = list(peers)
        self._name_width = max(len(peer) for peer in peers)
        headings = " ".join(_HEADINGS.get(link, link) for link in LINKS)
        self._print(Text(f"  {'':<{self._name_width}}   {headings}", style="bold"))
        self.wait(f"asking {', '.join(self._waiting)}")

    def add_peer(self, diagnosis: Diagnosis) -> None:
        from rich.text import Text

        self._waiting.remove(diagnosis.peer)
        if self._waiting:
            self.wait(f"asking {', '.join(self._waiting)}")
        else:
            self._status.stop()
        line = Text("  ").append(*_SIGNS[_worst(diagnosis.links)])
        line.append(f" {diagnosis.peer:<{self._name_width}} ")
        for link in diagnosis.links:
            sign, style = _SIGNS[link.mark]
            heading = _HEADINGS.get(link.name, link.name)
            line.append(f"{sign:^{len(heading)}} ", style)
        self._print(line.append(diagnosis.about))
        for link in diagnosis.links:
            if link.advice:
                sign, style = _SIGNS[link.mark]
                heading = _HEADINGS.get(link.name, link.name)
                about = Text("    ").append(f"{sign} {heading}: ", style)
                self._print(about.append(link.about))
                self._print(_advice(link, 6))
        if any(link.mark is Mark.NOT_KNOWN for link in diagnosis.links) and not self._waiting:
            self._print(Text(f"    {_NOT_KNOWN}", style="dim"))

    def end(self) -> None:
        """Print what a program wants to read, and end with 3 if something is broken."""
        broken = any(check.mark is Mark.BROKEN for check in self._checks)
        broken = broken or any(diagnosis.broken for diagnosis in self.diagnoses)
        data = {
            "ok": not broken,
            "checks": [asdict(check) for check in self._checks],
            "peers": [_plain(diagnosis) for diagnosis in self.diagnoses],
        }
        show(self._format, data, lambda: None)  # people have seen it already
        if broken:
            raise typer.Exit(EXIT_UNHEALTHY)

    def _print(self, line: Text) -> None:
        # A line that is too long for the terminal is wrapped there; in a file it stays one.
        self._console.print(line, soft_wrap=True)


def _worst(links: Sequence[Check]) -> Mark:
    marks = {link.mark for link in links}
    return next((mark for mark in (Mark.BROKEN, Mark.DIFFERS) if mark in marks), Mark.HOLDS)


def _advice(check: Check, indent: int) -> Text:
    from rich.text import Text

    return Text(f"{'':<{indent}}what to do: {check.advice}")


def _plain(diagnosis: Diagnosis) -> dict[str, Any]:
    return {**asdict(diagnosis), "ok": not diagnosis.broken}
