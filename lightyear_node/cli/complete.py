"""What the shell offers at the Tab key: names of peers, numbers of rounds.

Read from the files at hand, without anything heavy.  Whatever is wrong with them, there is then
nothing to offer: a completion never prints an error into somebody's half-typed line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import typer

from lightyear_node.errors import LightyearError

PEERS_NAME = "peers.yaml"


def peer_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Of the peers.yaml that the line names, of the node's folder, or of this one."""
    from lightyear_node.config.agreement import load_agreement

    for path in _peers_files(ctx):
        with contextlib.suppress(LightyearError, OSError):
            names = [peer.name for peer in load_agreement(path).peers]
            taken = ctx.params.get("names") or ()
            return [name for name in names if name.startswith(incomplete) and name not in taken]
    return []


def round_numbers(ctx: typer.Context, incomplete: str) -> list[str]:
    """The recorded rounds, newest first."""
    from lightyear_node.audit.export import opened
    from lightyear_node.audit.rounds import rounds_of
    from lightyear_node.cli.common import state_dir_of

    with (
        contextlib.suppress(LightyearError, OSError),
        opened(state_dir_of(_home(ctx))) as source,
    ):
        numbers = sorted(rounds_of(source.rows()), reverse=True)
        return [str(number) for number in numbers if str(number).startswith(incomplete)]
    return []


def _peers_files(ctx: typer.Context) -> Iterator[Path]:
    given = ctx.params.get("peers")
    if given is not None:
        yield Path(given)
    yield _home(ctx) / PEERS_NAME
    yield Path(PEERS_NAME)


def _home(ctx: typer.Context) -> Path:
    return Path(ctx.params.get("home") or ".")
