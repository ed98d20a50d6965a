"""`start`: run this site's node until it is stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from lightyear_node.cli import app
from lightyear_node.cli.common import HomeOption, examples


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
        str | None, typer.Option(help="host:port of metrics and health; empty for none.")
    ] = None,
    state_dir: Annotated[str | None, typer.Option(help="Where the node keeps its state.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning, error.")] = None,
    log_format: Annotated[
        str | None, typer.Option(help="human, or json: an object per line.")
    ] = None,
    exit_when_done: Annotated[
        bool,
        typer.Option(
            "--exit-when-done",
            help="End when every site has finished; otherwise go on serving until stopped.",
        ),
    ] = False,
    recovered: Annotated[
        bool,
        typer.Option(
            "--recovered",
            help="The state directory was restored from a backup: ask the others what it lacks.",
        ),
    ] = False,
) -> None:
    """Run this site: train, exchange, judge, merge, round after round."""
    import asyncio
    import signal
    from datetime import UTC, datetime
    from functools import partial

    from lightyear_node.errors import LightyearError
    from lightyear_node.home import Home, load_home
    from lightyear_node.observe.log import set_up

    given: dict[str, Any] = {
        "listen": listen,
        "state_dir": state_dir,
        "device": device,
        "task": {"entry": task} if task is not None else None,
        "http": {"listen": http} if http is not None else None,
        "log": _given(level=log_level, format=log_format),
    }
    flags = _given(**given) or {}

    def load() -> Home:
        return load_home(home, peers, environment=os.environ, flags=flags, now=datetime.now(UTC))

    settings = load()
    log = set_up(settings.site.log.level, settings.site.log.format)

    async def run() -> None:
        from lightyear_node.node import Node
        from lightyear_node.space import opened

        def make() -> Node:
            return Node(settings, log, load, exit_when_done=exit_when_done, recovered=recovered)

        warn = partial(log.warning, "%s", extra={"event": "disk"})
        node = await opened(settings.directory / settings.site.state_dir, make, warn)
        loop = asyncio.get_running_loop()

        def stop(name: str) -> None:
            log.info("%s: stopping", name, extra={"event": "stopping"})
            node.request_stop()
            # A second signal does not wait for anything.
            for sig in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(sig, os._exit, 130)

        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, stop, sig.name)
        loop.add_signal_handler(signal.SIGHUP, node.request_reload)
        await node.run()

    about = (settings.us, settings.agreement.federation)
    log.info("%s of federation %s", *about, extra={"event": "start"})
    try:
        asyncio.run(run())
    except LightyearError as problem:
        if settings.site.log.format != "json":
            raise
        # Whoever reads the log as JSON gets the last line so, too.
        hint = f"; what to do: {problem.hint}" if problem.hint else ""
        log.error("%s%s", problem, hint, extra={"event": "failed"})
        raise typer.Exit(problem.exit_code) from None


def _given(**options: Any) -> dict[str, Any] | None:
    """What was said on the command line; None if nothing was."""
    return {key: value for key, value in options.items() if value is not None} or None
