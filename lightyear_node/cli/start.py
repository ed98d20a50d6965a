"""`start`: run this site's node until it is stopped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightyear_node.cli import app
from lightyear_node.cli.common import HomeOption, examples, load_site
from lightyear_node.errors import LightyearError

if TYPE_CHECKING:
    from lightyear_node.node.home import Home


@app.command(
    epilog=examples(
        "lightyear-node start --peers peers.yaml",
        "lightyear-node start --peers peers.yaml --task my_package.tasks:build",
        "lightyear-node start --peers peers.yaml --log-format json",
    )
)
def start(
    peers: Annotated[Path, typer.Option("--peers", help="The federation's peers.yaml.")],
    home: HomeOption = Path(),
    task: Annotated[str | None, typer.Option(help="Your model: `package.module:function`.")] = None,
    listen: Annotated[str | None, typer.Option(help="host:port to listen on.")] = None,
    http: Annotated[
        str | None, typer.Option(help="host:port for metrics and health; empty to disable.")
    ] = None,
    state_dir: Annotated[str | None, typer.Option(help="Directory of the node's state.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error.")] = None,
    log_format: Annotated[
        str | None, typer.Option(help="human, or json: one object per line.")
    ] = None,
    exit_when_done: Annotated[
        bool,
        typer.Option(
            "--exit-when-done",
            help="Exit when every site has finished, instead of serving until stopped.",
        ),
    ] = False,
    recovered: Annotated[
        bool,
        typer.Option(
            "--recovered",
            help="The state directory was restored from a backup: ask the peers what it lacks.",
        ),
    ] = False,
) -> None:
    """Run this site: train, exchange, judge and merge, round after round."""
    given: dict[str, Any] = {
        "listen": listen,
        "state_dir": state_dir,
        "device": device,
        "task": {"entry": task} if task is not None else None,
        "http": {"listen": http} if http is not None else None,
        "log": _given(level=log_level, format=log_format),
    }
    flags = _given(**given) or {}
    load = partial(load_site, home, peers, flags)
    _run(load, exit_when_done=exit_when_done, recovered=recovered)


def _given(**options: Any) -> dict[str, Any] | None:
    """The options that were set on the command line; None if there are none."""
    return {key: value for key, value in options.items() if value is not None} or None


def _run(load: Callable[[], Home], *, exit_when_done: bool, recovered: bool) -> None:
    """Run the node until it ends; with a JSON log, a fatal error is a line of that log, too."""
    from lightyear_node.observe.log import set_up

    settings = load()
    log = set_up(settings.config.log.level, settings.config.log.format)

    from lightyear_node.node.run import run_node

    try:
        run_node(settings, log, load, exit_when_done=exit_when_done, recovered=recovered)
    except LightyearError as problem:
        if settings.config.log.format != "json":
            raise
        hint = f"; what to do: {problem.hint}" if problem.hint else ""
        log.error("%s%s", problem, hint, extra={"event": "failed"})
        raise typer.Exit(problem.exit_code) from None
