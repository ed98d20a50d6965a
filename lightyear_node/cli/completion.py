"""Shell completion of peer names and round numbers.

Reads the local files without slow imports.  If a file is missing or invalid there are no
completions: an error message would appear in the line that the user is typing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import typer

from lightyear_node.errors import LightyearError

PEERS_NAME = "peers.yaml"


def peer_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names from the peers.yaml given on the line, in the node's folder, or in this folder."""
    from lightyear_node.config.federation import load_federation_config

    for path in _peers_files(ctx):
        with contextlib.suppress(LightyearError, OSError):
            names = [peer.name for peer in load_federation_config(path).peers]
            taken = ctx.params.get("names") or ()
            return [name for name in names if name.startswith(incomplete) and name not in taken]
    return []


def round_numbers(ctx: typer.Context, incomplete: str) -> list[str]:
    """The recorded rounds, newest first."""
    from lightyear_node.audit.export import open_records
    from lightyear_node.audit.rounds import rounds_of
    from lightyear_node.cli.common import state_dir_of

    with (
        contextlib.suppress(LightyearError, OSError),
        open_records(state_dir_of(_home(ctx))) as source,
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
