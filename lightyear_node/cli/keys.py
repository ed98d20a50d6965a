"""`init` and `id`: who we are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightyear_node.cli import app
from lightyear_node.cli.common import Format, FormatOption, HomeOption, examples, show

if TYPE_CHECKING:
    from lightyear_node.config.site import Site

NO_ADDRESS = "none"

_NODE_YAML = """\
# This site's own settings; every one of them can also be given by environment or flag.
{reached}
http: {{listen: "{http}"}}   # metrics and health; empty switches it off

# Your own model in place of the built-in digits:
# task: {{entry: "my_package.my_module:build", args: {{data_root: /data}}}}
"""

_REACHED = """\
address: {address}      # where the other sites reach this one
listen: {listen}       # where this node listens"""
_NOT_REACHED = """\
address: null      # nobody can reach this site: it opens all connections itself"""


@app.command(
    epilog=examples(
        "lightyear-node init site-a --name site-a --address fl.a.example.org:7443",
        "lightyear-node init site-b --name site-b --address none",
    )
)
def init(
    directory: Annotated[Path, typer.Argument(help="Folder to make, one per site.")],
    name: Annotated[str, typer.Option(help="The site's name, for example site-a.")],
    address: Annotated[
        str,
        typer.Option(
            help="host:port at which the other sites reach it; `none` if they cannot, and this"
            " one is to open all connections itself."
        ),
    ],
    listen: Annotated[
        str | None, typer.Option(help="host:port to listen on, where it differs from --address.")
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            help="host:port of metrics and health, on loopback.",
            show_default="127.0.0.1, the port to listen on + 2021: 9464 for 7443",
        ),
    ] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Make a site's keys and settings.  The private keys never leave this folder."""
    from datetime import UTC, datetime

    from lightyear_node.config.site import NODE_FILE
    from lightyear_node.errors import ConfigError
    from lightyear_node.identity import make_identity
    from lightyear_node.joining import check_address

    reached, port = _NOT_REACHED, 7443
    if address != NO_ADDRESS:
        listen = listen or address
        check_address(address)
        check_address(listen)
        reached = _REACHED.format(address=address, listen=listen)
        port = int(listen.rpartition(":")[2])
    http = http or f"127.0.0.1:{_http_port(port)}"
    settings = directory / NODE_FILE
    if settings.exists():
        raise ConfigError(
            f"{settings} exists already",
            hint="choose another folder, or move it away to start anew",
        )
    identity = make_identity(name, datetime.now(UTC))
    identity.save(directory / "keys")
    text = _NODE_YAML.format(reached=reached, http=http)
    settings.write_text(text, encoding="utf-8")
    data = {
        "name": identity.name,
        "fingerprint": identity.fingerprint,
        "directory": str(directory),
        "expires": identity.certificate.expires.isoformat(),
    }
    show(format, data, lambda: typer.echo(f"{identity.name} {identity.fingerprint}"))
    typer.echo(
        f"Made {directory}: keys/ (keep it secret) and {NODE_FILE}.\n"
        f"Next: cd {directory}; `lightyear-node id` prints the line the other sites need.",
        err=True,
    )


def _http_port(port: int) -> int:
    """Beside the usual 7443 the usual 9464, and sites that share a machine do not collide."""
    return port + 2021 if port + 2021 < 65536 else 9464


def own_address(home: Path, site: Site) -> str | None:
    """What node.yaml says; None only if it says so."""
    from lightyear_node.config.site import NODE_FILE
    from lightyear_node.errors import ConfigError

    if "address" not in site.model_fields_set:
        raise ConfigError(
            f"{home / NODE_FILE} has no `address`",
            hint="add `address: host:port` to it, or `address: null` if nobody can reach it",
        )
    return site.address


@app.command("id", epilog=examples("lightyear-node id", "lightyear-node id --home site-a"))
def show_id(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """Print this site's join line, which the others give to `peers add`."""
    from lightyear_node.config.site import NODE_FILE, load_site
    from lightyear_node.identity import Identity
    from lightyear_node.joining import join_line

    site = load_site(home / NODE_FILE, os.environ)
    identity = Identity.load(home / site.keys_dir)
    line = join_line(identity, own_address(home, site))
    data = {
        "name": identity.name,
        "fingerprint": identity.fingerprint,
        "address": site.address,
        "expires": identity.certificate.expires.isoformat(),
        "join": line,
    }
    show(format, data, lambda: typer.echo(line))
