"""`pause`, `resume`, `stop`, `peers block|unblock|unquarantine`: what a running node is told."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Annotated, Any

import typer

from lightyear_node.cli import app, peers_app
from lightyear_node.cli.common import HomeOption, state_dir_of

PeerArgument = Annotated[str, typer.Argument(help="The site's name in peers.yaml.")]


@app.command()
def pause(home: HomeOption = Path()) -> None:
    """Complete the round under way, then begin no other; also after a restart."""
    _command(home, "pause")


@app.command()
def resume(home: HomeOption = Path()) -> None:
    """Go on after `pause`, in the round that the others have reached."""
    _command(home, "resume")


@app.command()
def stop(
    home: HomeOption = Path(),
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the round to end.")] = False,
) -> None:
    """End the node when the round under way is completed."""
    _command(home, "stop", now=now)


@peers_app.command()
def block(peer: PeerArgument, home: HomeOption = Path()) -> None:
    """Merge nothing of a site, do not wait for it, and send it nothing."""
    _command(home, "block", peer=peer)


@peers_app.command()
def unblock(peer: PeerArgument, home: HomeOption = Path()) -> None:
    """Work with a site again."""
    _command(home, "unblock", peer=peer)


@peers_app.command()
def unquarantine(peer: PeerArgument, home: HomeOption = Path()) -> None:
    """Work again with a site that signed two updates of one round; first find out why it did."""
    _command(home, "unquarantine", peer=peer)


def _command(home: Path, command: str, **about: Any) -> None:
    from lightyear_node.errors import LightyearError
    from lightyear_node.observe.admin import ask

    answer = ask(state_dir_of(home), command, user=_user(), **about)
    if "refused" in answer:
        raise LightyearError(answer["refused"], hint=answer["hint"])
    typer.echo(answer["done"])


def _user() -> str:
    """Who gave the command, for the record; a container may have no name for its user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
