"""`init` and `id`: the keys, settings and join line of this site."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightyear_node.cli import app
from lightyear_node.cli.common import Format, FormatOption, HomeOption, examples, node_config, show
from lightyear_node.errors import ConfigError

if TYPE_CHECKING:
    from lightyear_node.config.node import NodeConfig
    from lightyear_node.identity.keys import Identity

NO_ADDRESS = "none"

_NODE_YAML = """\
# This site's settings; environment variables and flags can override each of them.
{addresses}
http: {{listen: "{http}"}}   # metrics and health; empty disables it

# Your own model instead of the built-in digits:
# task: {{entry: "my_package.my_module:build", args: {{data_root: /data}}}}
"""

_ADDRESSES = """\
address: "{address}"      # where the other sites reach this one
listen: "{listen}"       # where this node listens"""
_NO_ADDRESSES = """\
address: null      # not reachable from outside: this site opens all connections itself"""


@app.command(
    epilog=examples(
        "lightyear-node init site-a --name site-a --address fl.a.example.org:7443",
        "lightyear-node init site-a --name site-a --address fl.a.example.org:7443"
        " --listen 0.0.0.0:7443",
        "lightyear-node init site-b --name site-b --address none",
    )
)
def init(
    directory: Annotated[Path, typer.Argument(help="Folder to create, one per site.")],
    name: Annotated[str, typer.Option(help="The site's name, for example site-a.")],
    address: Annotated[
        str,
        typer.Option(
            help="host:port at which the other sites reach this one; `none` if they cannot, then it"
            " opens all connections itself."
        ),
    ],
    listen: Annotated[
        str | None,
        typer.Option(
            help="host:port to listen on, if it differs from --address. Behind NAT, with port"
            " forwarding or in a container the machine does not have that address: 0.0.0.0:7443"
            " listens on all interfaces.",
            show_default="--address",
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(
            help="host:port for metrics and health, on loopback; empty to disable.",
            show_default="127.0.0.1, listening port + 2021: 9464 for 7443",
        ),
    ] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Create a site's keys and settings.  The private keys never leave this folder."""
    from datetime import UTC, datetime

    from lightyear_node.config.node import NODE_FILE
    from lightyear_node.identity.keys import make_identity

    text = _settings_text(address, listen, http)
    settings = directory / NODE_FILE
    if settings.exists():
        raise ConfigError(
            f"{settings} exists already", hint="choose another folder, or move this one away"
        )
    identity = make_identity(name, datetime.now(UTC))
    identity.save(directory / "keys")
    settings.write_text(text, encoding="utf-8")
    data = {**about_identity(identity), "directory": str(directory)}
    show(format, data, lambda: typer.echo(f"{identity.name} {identity.fingerprint}"))
    typer.echo(
        f"Created {directory}: keys/ (keep it secret) and {NODE_FILE}.\n"
        f"Next: cd {directory}; `lightyear-node id` prints the line that the other sites need.",
        err=True,
    )


def _settings_text(address: str, listen: str | None, http: str | None) -> str:
    """Check the addresses and return the text of node.yaml."""
    from lightyear_node.identity.invite import check_address

    if listen is not None and address == NO_ADDRESS:
        raise ConfigError(
            "--listen has no meaning with --address none: this site would open no port",
            hint="leave --listen out, or give the address at which the others reach this site",
        )
    addresses, port = _NO_ADDRESSES, 7443
    if address != NO_ADDRESS:
        listen = listen or address
        check_address(address)
        check_address(listen)
        addresses = _ADDRESSES.format(address=address, listen=listen)
        port = int(listen.rpartition(":")[2])
    if http is None:
        http = f"127.0.0.1:{_http_port(port)}"
    elif http:
        check_address(http)
    return _NODE_YAML.format(addresses=addresses, http=http)


def _http_port(port: int) -> int:
    """9464 for the default port 7443; different for sites that share a machine."""
    return port + 2021 if port + 2021 < 65536 else 9464


def own_address(home: Path, site: NodeConfig) -> str | None:
    """Return the address in node.yaml; None if that is its value.  It must be set."""
    from lightyear_node.config.node import NODE_FILE

    if "address" not in site.model_fields_set:
        raise ConfigError(
            f"{home / NODE_FILE} has no `address`",
            hint="add `address: host:port`, or `address: null` if no other site can reach it",
        )
    return site.address


def about_identity(identity: Identity) -> dict[str, str]:
    return {
        "name": identity.name,
        "fingerprint": identity.fingerprint,
        "expires": identity.certificate.expires.isoformat(),
    }


@app.command("id", epilog=examples("lightyear-node id", "lightyear-node id --home site-a"))
def show_id(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """Print this site's join line, for `peers add` at the other sites."""
    from lightyear_node.identity.invite import invite_line
    from lightyear_node.identity.keys import Identity

    site = node_config(home)
    identity = Identity.load(home / site.keys_dir)
    line = invite_line(identity, own_address(home, site))
    data = {**about_identity(identity), "address": site.address, "join": line}
    show(format, data, lambda: typer.echo(line))
