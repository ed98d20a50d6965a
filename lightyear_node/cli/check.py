"""`check` and `peers ping`: diagnose this site and its connections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from lightyear_node.cli import EXIT_UNHEALTHY, app, peers_app
from lightyear_node.cli.common import (
    Format,
    FormatOption,
    HomeOption,
    PeersOption,
    examples,
    load_site,
    show,
    unknown_peer,
)
from lightyear_node.cli.completion import peer_names
from lightyear_node.errors import ConfigError, LightyearError
from lightyear_node.types import Check, Mark, PeerName

if TYPE_CHECKING:
    from rich.text import Text

    from lightyear_node.node.home import Home
    from lightyear_node.tools.diagnosis import Diagnosis
    from lightyear_node.tools.preflight import LocalModel

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
"""Column headings; other links use their own name."""
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
        bool, typer.Option("--no-model", help="Do not build the model: faster, checks less.")
    ] = False,
    timeout: TimeoutOption = 5.0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Check everything that could keep this site from working, and say what to do.

    Changes nothing, here or at the peers; a node may be running.  Exits with 3 if something is
    broken.
    """
    import asyncio

    with _Report(format) as report:
        asyncio.run(_check(report, home, peers, build=not no_model, timeout_s=timeout))
    report.end()


@peers_app.command(
    "ping", epilog=examples("lightyear-node peers ping", "lightyear-node peers ping site-b")
)
def ping(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Sites to ask; all by default.", autocompletion=peer_names),
    ] = None,
    home: HomeOption = Path(),
    peers: PeersOption = Path("peers.yaml"),
    timeout: TimeoutOption = 5.0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Check step by step whether other sites are reachable and compatible.

    Does not disturb them.  Exits with 3 if a step fails.
    """
    import asyncio

    from lightyear_node.tools.preflight import remembered_model

    settings = load_site(home, peers)
    wanted = _chosen(settings, peers, names or [])
    model = remembered_model(settings)
    with _Report(format) as report:
        asyncio.run(_ask(report, settings, wanted, model, timeout))
    report.end()


def _chosen(home: Home, peers: Path, names: Sequence[str]) -> list[PeerName]:
    for name in names:
        if name == home.us:
            raise ConfigError(f"{name} is this site itself", hint="name another, or none for all")
        if name not in home.others:
            raise unknown_peer(str(peers), name, home.others)
    return [peer for peer in home.others if not names or peer in names]


async def _check(
    report: _Report, folder: Path, peers: Path, *, build: bool, timeout_s: float
) -> None:
    from datetime import UTC, datetime

    from lightyear_node.tools.preflight import (
        LocalModel,
        failed,
        model_checks,
        port_checks,
        remembered_model,
        settings_checks,
        state_checks,
    )

    try:
        home = load_site(folder, peers)
    except LightyearError as problem:
        report.add([failed("settings", problem)])
        return
    report.add(settings_checks(home, datetime.now(UTC)))
    report.add(port_checks(home))
    model: LocalModel | None = None
    if build:
        report.wait(f"building the model of {home.config.task.name}")
        checks, model = await model_checks(home)
        report.add(checks)
        report.model = model
    else:
        report.add([Check("model", Mark.NOT_REACHED, "not built (--no-model)")])
    report.add(state_checks(home, model))
    if model is None:
        try:
            model = remembered_model(home)
        except LightyearError:  # already reported by `state_checks`
            model = LocalModel()
    await _ask(report, home, home.others, model, timeout_s)


async def _ask(
    report: _Report, home: Home, peers: Sequence[PeerName], model: LocalModel, timeout_s: float
) -> None:
    from datetime import UTC, datetime

    from lightyear_node.tools.preflight import check_peers

    report.begin_peers(peers)
    now = datetime.now(UTC)
    report.diagnoses = await check_peers(
        home, peers, model, now=now, timeout_s=timeout_s, on_result=report.add_peer
    )


class _Report:
    """Prints results as they arrive; JSON is printed at the end."""

    def __init__(self, format: Format) -> None:
        import sys

        from rich.console import Console

        self._format = format
        # With JSON on standard output, progress goes to the terminal on standard error.
        json = format is not Format.TABLE
        self._console = Console(stderr=json, quiet=json and not sys.stderr.isatty())
        self._status = self._console.status("")
        self._checks: list[Check] = []
        self._waiting: list[PeerName] = []
        self._name_width = 0
        self.diagnoses: list[Diagnosis] = []
        self.model: LocalModel | None = None

    def wait(self, what: str) -> None:
        """Show a spinner, on a terminal only."""
        from lightyear_node.observe.progress import can_redraw

        if can_redraw(self._console):
            self._status.update(f"{what} …")
            self._status.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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

        from lightyear_node.tools.diagnosis import LINKS

        if not peers:
            self._print(Text("  this site trains alone: there are no peers to ask"))
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
        advice: list[Text] = []
        for link in diagnosis.links:
            sign, style = _SIGNS[link.mark]
            heading = _HEADINGS.get(link.name, link.name)
            line.append(f"{sign:^{len(heading)}} ", style)
            if link.advice:
                about = Text("    ").append(f"{sign} {heading}: ", style)
                advice += [about.append(link.about), _advice(link, 6)]
        for text in (line.append(diagnosis.about), *advice):
            self._print(text)
        if any(link.mark is Mark.NOT_KNOWN for link in diagnosis.links) and not self._waiting:
            self._print(Text(f"    {_NOT_KNOWN}", style="dim"))

    def end(self) -> None:
        """Print the JSON document, if requested; exit with 3 if something is broken."""
        broken = any(check.mark is Mark.BROKEN for check in self._checks)
        broken = broken or any(diagnosis.broken for diagnosis in self.diagnoses)
        data = {
            "ok": not broken,
            "checks": [asdict(check) for check in self._checks],
            "peers": [{**asdict(one), "ok": not one.broken} for one in self.diagnoses],
        }
        if self.model is not None and self.model.exchange is not None:
            data["exchange"] = asdict(self.model.exchange)
        show(self._format, data, lambda: None)  # the text has been printed already
        if broken:
            raise typer.Exit(EXIT_UNHEALTHY)

    def _print(self, line: Text) -> None:
        # Long lines are wrapped by the terminal, and stay whole in a file.
        self._console.print(line, soft_wrap=True)


def _worst(links: Sequence[Check]) -> Mark:
    marks = {link.mark for link in links}
    return next((mark for mark in (Mark.BROKEN, Mark.DIFFERS) if mark in marks), Mark.HOLDS)


def _advice(check: Check, indent: int) -> Text:
    from rich.text import Text

    return Text(f"{'':<{indent}}what to do: {check.advice}")
