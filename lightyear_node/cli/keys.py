"""`init`, `id` and `peers`: who we are, and who the others are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightyear_node.cli import app, peers_app
from lightyear_node.cli.common import Format, FormatOption, HomeOption, PeersOption, print_json

if TYPE_CHECKING:
    from lightyear_node.config import Site

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


@app.command()
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
            show_default="127.0.0.1, --address's port + 2021: 9464 for 7443",
        ),
    ] = None,
) -> None:
    """Make a site's keys and settings.  The private keys never leave this folder."""
    from datetime import UTC, datetime

    from lightyear_node.config import NODE_FILE
    from lightyear_node.errors import ConfigError
    from lightyear_node.identity import check_address, make_identity

    reached = _NOT_REACHED
    if address != NO_ADDRESS:
        check_address(address)
        check_address(listen or address)
        reached = _REACHED.format(address=address, listen=listen or address)
    http = http or f"127.0.0.1:{_http_port(address)}"
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
    typer.echo(f"{identity.name} {identity.fingerprint}")
    typer.echo(
        f"Made {directory}: keys/ (keep it secret) and {NODE_FILE}.\n"
        f"Next: cd {directory}; `lightyear-node id` prints the line the other sites need.",
        err=True,
    )


def _http_port(address: str) -> int:
    """Beside the usual 7443 the usual 9464, and sites that share a machine do not collide."""
    port = 7443 if address == NO_ADDRESS else int(address.rpartition(":")[2])
    return port + 2021 if port + 2021 < 65536 else 9464


def own_address(home: Path, site: Site) -> str | None:
    """What node.yaml says; None only if it says so."""
    from lightyear_node.config import NODE_FILE
    from lightyear_node.errors import ConfigError

    if "address" not in site.model_fields_set:
        raise ConfigError(
            f"{home / NODE_FILE} has no `address`",
            hint="add `address: host:port` to it, or `address: null` if nobody can reach it",
        )
    return site.address


@app.command("id")
def show_id(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """Print this site's join line, which the others give to `peers add`."""
    from lightyear_node.config import NODE_FILE, load_site
    from lightyear_node.identity import Identity, join_line

    site = load_site(home / NODE_FILE, os.environ)
    identity = Identity.load(home / site.keys_dir)
    line = join_line(identity, own_address(home, site))
    if format is Format.JSON:
        data = {
            "name": identity.name,
            "fingerprint": identity.fingerprint,
            "address": site.address,
            "expires": identity.certificate.expires.isoformat(),
            "join": line,
        }
        print_json(data)
    else:
        typer.echo(line)


@peers_app.command("add")
def add(
    join: Annotated[list[str], typer.Argument(help="Join lines, as `lightyear-node id` prints.")],
    peers: PeersOption = Path("peers.yaml"),
    federation: Annotated[
        str | None, typer.Option(help="The federation's name, when the file is begun.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds to run.", min=1)] = None,
) -> None:
    """Add sites to peers.yaml, or begin it.  Give every site the same file.

    A new certificate of a site that is there already is added beside the old one.
    """
    from lightyear_node.identity import parse_join_line
    from lightyear_node.peers_file import add_peers

    sites = [parse_join_line(line) for line in join]
    agreement = add_peers(peers, sites, federation, rounds)
    names = ", ".join(peer.name for peer in agreement.peers)
    typer.echo(f"{peers}: federation {agreement.federation} with {names}", err=True)
    for site in sites:
        typer.echo(f"{site.name} {site.certificate.fingerprint}")


@peers_app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="The site, by its name in peers.yaml.")],
    fingerprint: Annotated[
        str | None,
        typer.Option(help="Remove only this one of its two certificates: SHA256:…"),
    ] = None,
    peers: PeersOption = Path("peers.yaml"),
) -> None:
    """Remove a site from peers.yaml, or its old certificate.  Running nodes act on it at once."""
    from lightyear_node.peers_file import remove_peer

    agreement = remove_peer(peers, name, fingerprint)
    names = ", ".join(peer.name for peer in agreement.peers) or "nobody"
    typer.echo(f"{peers}: federation {agreement.federation} with {names}", err=True)


@peers_app.command("list")
def list_peers(
    peers: PeersOption = Path("peers.yaml"), format: FormatOption = Format.TABLE
) -> None:
    """Show who is in peers.yaml."""
    from lightyear_node.config import load_agreement

    agreement = load_agreement(peers)
    rows = [
        {"name": peer.name, "address": peer.address, "fingerprint": list(peer.fingerprint)}
        for peer in agreement.peers
    ]
    if format is Format.JSON:
        print_json({"federation": agreement.federation, "peers": rows})
        return
    for peer in agreement.peers:
        typer.echo(f"{peer.name}\t{peer.address or 'it calls us'}\t{' '.join(peer.fingerprint)}")
