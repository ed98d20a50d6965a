"""`renew`: a new certificate for this site, without a restart anywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightyear_node.cli import app
from lightyear_node.cli.common import Format, FormatOption, HomeOption, examples, show

if TYPE_CHECKING:
    from lightyear_node.config.agreement import Agreement
    from lightyear_node.config.site import Site
    from lightyear_node.identity import Identity


@app.command(epilog=examples("lightyear-node renew", "lightyear-node renew --activate"))
def renew(
    home: HomeOption = Path(),
    peers: Annotated[
        Path | None,
        typer.Option(
            "--peers",
            help="The federation's peers.yaml.",
            show_default="peers.yaml, if it is there",
        ),
    ] = None,
    activate: Annotated[
        bool,
        typer.Option(
            "--activate", help="Put the prepared certificate into use, once every site has it."
        ),
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Prepare a new certificate and print its join line, which the others give to `peers add`."""
    from lightyear_node.config.agreement import load_agreement
    from lightyear_node.config.site import NODE_FILE, load_site

    site = load_site(home / NODE_FILE, os.environ)
    peers_file = peers or Path("peers.yaml")
    found = peers is not None or peers_file.exists()
    agreement = load_agreement(peers_file) if found else None
    if activate:
        _activate(home / site.keys_dir, agreement, peers_file, format)
    else:
        _prepare(home / site.keys_dir, home, site, agreement, format)


def _prepare(
    keys_dir: Path, home: Path, site: Site, agreement: Agreement | None, format: Format
) -> None:
    from datetime import UTC, datetime

    from lightyear_node import renewal
    from lightyear_node.identity import Identity
    from lightyear_node.joining import join_line

    address = _address(home, site, agreement, Identity.load(keys_dir))
    already = renewal.prepared(keys_dir) is not None
    renewed = renewal.prepare(keys_dir, datetime.now(UTC))
    line = join_line(renewed, address)
    data = {**_about(renewed), "address": address, "already": already, "join": line}
    show(format, data, lambda: typer.echo(line))
    typer.echo(
        f"{'Already prepared' if already else 'Prepared'}: {renewed.fingerprint},"
        f" valid until {renewed.certificate.expires:%Y-%m-%d}.\n"
        "Next: every site gives this line to `lightyear-node peers add`, this one too;"
        " then run `lightyear-node renew --activate` here.",
        err=True,
    )


def _activate(
    keys_dir: Path, agreement: Agreement | None, peers_file: Path, format: Format
) -> None:
    from lightyear_node import renewal
    from lightyear_node.identity import Identity

    before = Identity.load(keys_dir)
    renewed = renewal.prepared(keys_dir)
    if renewed is not None and agreement is not None:
        renewal.check_listed(renewed, agreement, peers_file)
    renewed = renewal.activate(keys_dir)
    data = {**_about(renewed), "checked": agreement is not None}
    show(format, data, lambda: typer.echo(f"{renewed.name} {renewed.fingerprint}"))
    unchecked = "" if agreement is not None else f" {peers_file} is not here: nothing was compared."
    old = before.fingerprint if before.fingerprint != renewed.fingerprint else "OLD"
    typer.echo(
        f"In use now, until {renewed.certificate.expires:%Y-%m-%d}; a running node takes it within"
        f" a second.{unchecked}\n"
        f"Next: every site runs `lightyear-node peers remove {renewed.name} --fingerprint {old}`.",
        err=True,
    )


def _address(home: Path, site: Site, agreement: Agreement | None, identity: Identity) -> str | None:
    from lightyear_node.cli.keys import own_address

    listed = agreement.find(identity.fingerprint) if agreement is not None else None
    return own_address(home, site) if listed is None or site.address else listed.address


def _about(identity: Identity) -> dict[str, str]:
    return {
        "name": identity.name,
        "fingerprint": identity.fingerprint,
        "expires": identity.certificate.expires.isoformat(),
    }
