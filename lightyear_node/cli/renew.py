"""`renew`: a new certificate for this site, without restarting any node."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightyear_node.cli import app
from lightyear_node.cli.common import Format, FormatOption, HomeOption, examples, node_config, show
from lightyear_node.cli.keys import about_identity, own_address

if TYPE_CHECKING:
    from lightyear_node.config.federation import FederationConfig
    from lightyear_node.config.node import NodeConfig
    from lightyear_node.identity.keys import Identity


@app.command(epilog=examples("lightyear-node renew", "lightyear-node renew --activate"))
def renew(
    home: HomeOption = Path(),
    peers: Annotated[
        Path | None,
        typer.Option(
            "--peers",
            help="The federation's peers.yaml.",
            show_default="peers.yaml, if it exists",
        ),
    ] = None,
    activate: Annotated[
        bool,
        typer.Option("--activate", help="Use the prepared certificate, once every site has it."),
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Prepare a new certificate and print its join line, for `peers add` at every site."""
    from lightyear_node.config.federation import load_federation_config

    site = node_config(home)
    peers_file = peers or Path("peers.yaml")
    found = peers is not None or peers_file.exists()
    config = load_federation_config(peers_file) if found else None
    if activate:
        _activate(home / site.keys_dir, config, peers_file, format)
    else:
        _prepare(home / site.keys_dir, home, site, config, format)


def _prepare(
    keys_dir: Path, home: Path, site: NodeConfig, config: FederationConfig | None, format: Format
) -> None:
    from datetime import UTC, datetime

    from lightyear_node.identity import renewal
    from lightyear_node.identity.invite import invite_line
    from lightyear_node.identity.keys import Identity

    address = _address(home, site, config, Identity.load(keys_dir))
    already = renewal.prepared(keys_dir) is not None
    renewed = renewal.prepare(keys_dir, datetime.now(UTC))
    line = invite_line(renewed, address)
    data = {**about_identity(renewed), "address": address, "already": already, "join": line}
    show(format, data, lambda: typer.echo(line))
    typer.echo(
        f"{'Already prepared' if already else 'Prepared'}: {renewed.fingerprint},"
        f" valid until {renewed.certificate.expires:%Y-%m-%d}.\n"
        "Next: every site gives this line to `lightyear-node peers add`, this one too;"
        " then run `lightyear-node renew --activate` here.",
        err=True,
    )


def _activate(
    keys_dir: Path, config: FederationConfig | None, peers_file: Path, format: Format
) -> None:
    from lightyear_node.identity import renewal
    from lightyear_node.identity.keys import Identity

    before = Identity.load(keys_dir)
    renewed = renewal.prepared(keys_dir)
    if renewed is not None and config is not None:
        renewal.check_listed(renewed, config, peers_file)
    renewed = renewal.activate(keys_dir)
    data = {**about_identity(renewed), "checked": config is not None}
    show(format, data, lambda: typer.echo(f"{renewed.name} {renewed.fingerprint}"))
    unchecked = "" if config is not None else f" {peers_file} was not found: nothing was compared."
    old = before.fingerprint if before.fingerprint != renewed.fingerprint else "OLD"
    typer.echo(
        f"In use now, until {renewed.certificate.expires:%Y-%m-%d}; a running node loads it within"
        f" a second.{unchecked}\n"
        f"Next: every site runs `lightyear-node peers remove {renewed.name} --fingerprint {old}`.",
        err=True,
    )


def _address(
    home: Path, site: NodeConfig, config: FederationConfig | None, identity: Identity
) -> str | None:
    listed = config.find(identity.fingerprint) if config is not None else None
    return own_address(home, site) if listed is None or site.address else listed.address
