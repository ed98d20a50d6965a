"""`pause`, `resume`, `stop`, `peers block|unblock|unquarantine`: commands to a running node."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Annotated, Any

import typer

from lightyear_node.cli import app, peers_app
from lightyear_node.cli.common import (
    Format,
    FormatOption,
    HomeOption,
    PeerArgument,
    examples,
    show,
    state_dir_of,
)
from lightyear_node.errors import LightyearError


@app.command(epilog=examples("lightyear-node pause"))
def pause(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """Finish the current round, then start no other; lasts across restarts."""
    _command(home, format, "pause")


@app.command(epilog=examples("lightyear-node resume"))
def resume(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """Continue after `pause`, in the round that the other sites have reached."""
    _command(home, format, "resume")


@app.command(epilog=examples("lightyear-node stop", "lightyear-node stop --now"))
def stop(
    home: HomeOption = Path(),
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the round to end.")] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Stop the node after the current round."""
    _command(home, format, "stop", now=now)


@peers_app.command(epilog=examples("lightyear-node peers block site-b"))
def block(
    peer: PeerArgument, home: HomeOption = Path(), format: FormatOption = Format.TABLE
) -> None:
    """Stop exchanging with a site: merge none of its updates, do not wait for it, send it none."""
    _command(home, format, "block", peer=peer)


@peers_app.command(epilog=examples("lightyear-node peers unblock site-b"))
def unblock(
    peer: PeerArgument, home: HomeOption = Path(), format: FormatOption = Format.TABLE
) -> None:
    """Exchange updates with a blocked site again."""
    _command(home, format, "unblock", peer=peer)


@peers_app.command(epilog=examples("lightyear-node peers unquarantine site-b"))
def unquarantine(
    peer: PeerArgument, home: HomeOption = Path(), format: FormatOption = Format.TABLE
) -> None:
    """Accept a site again that signed two different updates for one round.

    Find out why it did before you run this.
    """
    _command(home, format, "unquarantine", peer=peer)


def _command(home: Path, format: Format, command: str, **about: Any) -> None:
    from lightyear_node.observe.admin_socket import ask

    answer = ask(state_dir_of(home), command, user=_user(), **about)
    if "refused" in answer:
        raise LightyearError(answer["refused"], hint=answer["hint"])
    show(format, answer, lambda: typer.echo(answer["done"]))


def _user() -> str:
    """The user name for the journal; empty if the user has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
