"""`pause`, `resume`, `stop`, `peers block|unblock|unquarantine`: what a running node is told."""

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


@app.command(epilog=examples("lightyear-node pause"))
def pause(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """Complete the round under way, then begin no other; also after a restart."""
    _command(home, format, "pause")


@app.command(epilog=examples("lightyear-node resume"))
def resume(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """Go on after `pause`, in the round that the others have reached."""
    _command(home, format, "resume")


@app.command(epilog=examples("lightyear-node stop", "lightyear-node stop --now"))
def stop(
    home: HomeOption = Path(),
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the round to end.")] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """End the node when the round under way is completed."""
    _command(home, format, "stop", now=now)


@peers_app.command(epilog=examples("lightyear-node peers block site-b"))
def block(
    peer: PeerArgument, home: HomeOption = Path(), format: FormatOption = Format.TABLE
) -> None:
    """Merge nothing of a site, do not wait for it, and send it nothing."""
    _command(home, format, "block", peer=peer)


@peers_app.command(epilog=examples("lightyear-node peers unblock site-b"))
def unblock(
    peer: PeerArgument, home: HomeOption = Path(), format: FormatOption = Format.TABLE
) -> None:
    """Work with a site again."""
    _command(home, format, "unblock", peer=peer)


@peers_app.command(epilog=examples("lightyear-node peers unquarantine site-b"))
def unquarantine(
    peer: PeerArgument, home: HomeOption = Path(), format: FormatOption = Format.TABLE
) -> None:
    """Work again with a site that signed two updates of one round; first find out why it did."""
    _command(home, format, "unquarantine", peer=peer)


def _command(home: Path, format: Format, command: str, **about: Any) -> None:
    from lightyear_node.errors import LightyearError
    from lightyear_node.observe.admin import ask

    answer = ask(state_dir_of(home), command, user=_user(), **about)
    if "refused" in answer:
        raise LightyearError(answer["refused"], hint=answer["hint"])
    show(format, answer, lambda: typer.echo(answer["done"]))


def _user() -> str:
    """Who gave the command, for the record; a container may have no name for its user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
