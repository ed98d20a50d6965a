"""`peers add|remove|list|show`: the sites of the federation and their state.

Names and certificates come from peers.yaml, the state from the running node, past verdicts from
the journal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightyear_node.cli import peers_app
from lightyear_node.cli.common import (
    Format,
    FormatOption,
    HomeOption,
    PeerArgument,
    PeersOption,
    console,
    examples,
    running,
    show,
    unknown_peer,
)
from lightyear_node.cli.rounds import recorded
from lightyear_node.cli.status_view import FATES, agreement_text, state_text
from lightyear_node.errors import ConfigError, LightyearError

if TYPE_CHECKING:
    from datetime import datetime

    from lightyear_node.config.federation import FederationConfig, PeerConfig
    from lightyear_node.identity.invite import Invite

PEERS_NAME = Path("peers.yaml")


@peers_app.command(
    "add",
    epilog=examples(
        'lightyear-node peers add --federation lungs --rounds 50 "$(lightyear-node id)"',
        "lightyear-node peers add 'lightyear-join:…'",
    ),
)
def add(
    join: Annotated[list[str], typer.Argument(help="Join lines printed by `lightyear-node id`.")],
    peers: PeersOption = PEERS_NAME,
    federation: Annotated[
        str | None, typer.Option(help="The federation's name, for a new file.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Number of rounds to run.", min=1)] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Add sites to peers.yaml, or create it.  Give every site the same file.

    A new certificate of a listed site is added beside the old one.  An expired certificate is
    refused.
    """
    from datetime import UTC, datetime

    from lightyear_node.identity.invite import parse_invite
    from lightyear_node.tools.peers_file import add_peers

    sites, now = [parse_invite(line) for line in join], datetime.now(UTC)
    for site in sites:
        _check_validity(site, now)
    config = add_peers(peers, sites, federation, rounds)
    added = [
        {"name": site.name, "fingerprint": site.certificate.fingerprint, "address": site.address}
        for site in sites
    ]

    def for_people() -> None:
        for site in added:
            typer.echo(f"{site['name']} {site['fingerprint']}")

    show(format, {**_plain_config(config), "added": added}, for_people)
    _print_members(peers, config)


@peers_app.command(
    "remove",
    epilog=examples(
        "lightyear-node peers remove site-b",
        "lightyear-node peers remove site-b --fingerprint SHA256:…",
    ),
)
def remove(
    name: PeerArgument,
    fingerprint: Annotated[
        str | None,
        typer.Option(help="Remove only this certificate of the site: SHA256:…"),
    ] = None,
    peers: PeersOption = PEERS_NAME,
    format: FormatOption = Format.TABLE,
) -> None:
    """Remove a site, or its old certificate, from peers.yaml.  Running nodes reload the file."""
    from lightyear_node.config.federation import load_federation_config
    from lightyear_node.tools.peers_file import remove_peer

    _find(peers, load_federation_config(peers), name)
    config = remove_peer(peers, name, fingerprint)
    show(format, _plain_config(config), lambda: None)
    _print_members(peers, config)


@peers_app.command(
    "list",
    epilog=examples(
        "lightyear-node peers list", "lightyear-node peers list --home site-a --format jsonl"
    ),
)
def list_peers(
    home: HomeOption = Path(),
    peers: PeersOption = PEERS_NAME,
    format: FormatOption = Format.TABLE,
) -> None:
    """List the sites in peers.yaml, with their state if a node runs here."""
    from lightyear_node.config.federation import load_federation_config

    config = load_federation_config(_file(home, peers))
    status = running(home)
    rows = [_row(peer, status) for peer in config.peers]
    data = {
        "federation": config.federation,
        "source": "files" if status is None else "node",
        "peers": rows,
    }
    show(format, data, lambda: _print_list(data), rows=rows)


@peers_app.command("show", epilog=examples("lightyear-node peers show site-b"))
def show_peer(
    name: PeerArgument,
    home: HomeOption = Path(),
    peers: PeersOption = PEERS_NAME,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show one site: its certificates, its state and how it was judged."""
    from lightyear_node.config.federation import load_federation_config
    from lightyear_node.node.home import pinned_certificates

    path = _file(home, peers)
    peer = _find(path, load_federation_config(path), name)
    status = running(home)
    data = {
        **_row(peer, status),
        "source": "files" if status is None else "node",
        "certificates": [
            {"fingerprint": one.fingerprint, "expires": one.expires.isoformat()}
            for one in pinned_certificates(path, peer)
        ],
        "threshold": status["threshold"] if status else None,
        "judged": _judged(home, name),
    }
    show(format, data, lambda: _print_peer(data))


def _check_validity(site: Invite, now: datetime) -> None:
    """Refuse an expired certificate; warn about one that is not valid yet."""
    certificate = site.certificate
    if certificate.expires <= now:
        raise ConfigError(
            f"the certificate of {site.name} expired on {certificate.expires:%Y-%m-%d}",
            hint=f"ask {site.name} to run `lightyear-node renew` and to send the new line; or set"
            " this machine's clock, if that is wrong",
        )
    if certificate.begins > now:
        typer.echo(
            f"warning: the certificate of {site.name} is not valid before"
            f" {certificate.begins:%Y-%m-%d %H:%M} UTC, and is refused until then:"
            " the clock there, or the one here, is wrong",
            err=True,
        )


def _file(home: Path, peers: Path) -> Path:
    """Return the given file, or the one in this folder, or the one in the node's folder."""
    in_home = home / PEERS_NAME
    return in_home if peers == PEERS_NAME and not peers.exists() and in_home.exists() else peers


def _find(path: Path, config: FederationConfig, name: str) -> PeerConfig:
    found = next((peer for peer in config.peers if peer.name == name), None)
    if found is None:
        raise unknown_peer(str(path), name, [peer.name for peer in config.peers])
    return found


def _plain_config(config: FederationConfig) -> dict[str, Any]:
    peers = [_row(peer, None) for peer in config.peers]
    return {"federation": config.federation, "peers": peers}


def _row(peer: PeerConfig, status: Mapping[str, Any] | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": peer.name,
        "address": peer.address,
        "fingerprint": list(peer.fingerprint),
    }
    if status is None:
        return row
    row["us"] = peer.name == status["name"]
    row["blocked"] = peer.name in status.get("blocked", ())
    row["quarantined"] = peer.name in status.get("quarantined", ())
    seen = next((one for one in status["peers"] if one["name"] == peer.name), None)
    transfer = next((one for one in status["transfers"] if one["peer"] == peer.name), None)
    return row | {"seen": seen, "transfer": transfer}


def _print_members(path: Path, config: FederationConfig) -> None:
    names = ", ".join(peer.name for peer in config.peers) or "no sites"
    typer.echo(f"{path}: federation {config.federation} with {names}", err=True)


def _judged(home: Path, name: str) -> dict[str, Any] | None:
    """Count a peer's verdicts in the journal; None if there is no journal."""
    from lightyear_node.config.node import NODE_FILE

    if not (home / NODE_FILE).exists():
        return None
    try:
        entries = recorded(home)
    except LightyearError:  # no journal yet, or damaged: `audit verify` reports that
        return None
    found = [
        {"round": number, **verdict}
        for number, entry in sorted(entries.items())
        for verdict in entry.to_plain()["verdicts"]
        if verdict["peer"] == name
    ]
    last = found[-1] if found else None
    return {
        **dict.fromkeys(FATES, 0),
        **Counter(one["fate"] for one in found),
        "last": last and {key: last[key] for key in ("round", "fate", "reason", "score")},
    }


def _print_list(data: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    from lightyear_node.observe.short_names import NameCell

    seen = data["source"] == "node"
    names = [row["name"] for row in data["peers"]]
    table = Table("peer", "address", box=None)
    if seen:
        for heading in ("state", "verdict", "agreement"):
            table.add_column(heading)
    table.add_column("fingerprint", no_wrap=True)
    for row in data["peers"]:
        cells: list[Any] = [NameCell(row["name"], names), Text(row["address"] or "it calls us")]
        if seen:
            cells += _state_cells(row)
        table.add_row(*cells, Text("\n".join(row["fingerprint"])))
    console().print(table)
    if not seen:
        typer.echo("no node runs here: from the file only", err=True)


def _state_cells(row: Mapping[str, Any]) -> list[Any]:
    from rich.text import Text

    seen = row["seen"]
    if seen is None:
        return [Text("this site" if row["us"] else "", "dim"), Text(), Text()]
    state = (
        "blocked" if row["blocked"] else "in quarantine" if row["quarantined"] else seen["state"]
    )
    verdict = FATES.get(seen["verdict"], ("", ""))
    return [Text(state), Text(*verdict), Text(agreement_text(seen, None))]


def _print_peer(data: Mapping[str, Any]) -> None:
    from rich.text import Text

    out = console()

    def line(heading: str, words: str, style: str = "") -> None:
        text = Text(f"  {heading:<12} ", "dim").append(words, style or "not dim")
        out.print(text, soft_wrap=True)

    out.print(Text(data["name"], "bold"))
    line("address", data["address"] or "none: it opens all connections itself")
    for certificate in data["certificates"]:
        line("certificate", f"{certificate['fingerprint']}, until {certificate['expires'][:10]}")
    if data["source"] == "files":
        line("state", "not known: no node runs here")
    elif data["us"]:
        line("state", "this site itself: see `lightyear-node status`")
    for mark, words in (("blocked", "unblock"), ("quarantined", "unquarantine")):
        if data.get(mark):
            line(mark, f"`lightyear-node peers {words} {data['name']}` ends it", "red")
    if data.get("seen"):
        _print_seen(data, line)
    judged = data["judged"]
    if judged is not None and judged["last"]:
        line("judged", ", ".join(f"{judged[fate]} × {fate}" for fate in FATES))
        last = judged["last"]
        line("last", f"round {last['round']}: {last['fate']} ({last['reason']})")
        line("why", f"lightyear-node explain --round {last['round']} --peer {data['name']}")


def _print_seen(data: Mapping[str, Any], line: Any) -> None:
    from lightyear_node.observe.progress import progress_text

    seen = data["seen"]
    line("state", state_text(seen))
    if seen["round"] is not None:
        line("it is at", f"round {seen['round']}, {seen['phase']}")
    if data["transfer"]:
        line("transfer", progress_text(data["transfer"], weights=True))
    if seen["verdict"]:
        verdict, style = FATES[seen["verdict"]]
        line("verdict", f"{verdict} in round {seen['verdict_round']} ({seen['reason']})", style)
    if seen["agreement"] is not None:
        line("agreement", agreement_text(seen, data["threshold"]))
    if seen["rejected_in_a_row"]:
        line("rejected", f"{seen['rejected_in_a_row']} times in a row", "red")
