"""`peers add|remove|list|show`: who is in the federation, and how they are doing.

What peers.yaml says is always there; how a peer does comes from the node that runs here, and from
the record where none runs.
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
from lightyear_node.cli.pictures import MARKS, STYLES, agreement_words, state_words
from lightyear_node.cli.rounds import recorded

if TYPE_CHECKING:
    from lightyear_node.config.agreement import Agreement, Peer

PEERS_NAME = Path("peers.yaml")


@peers_app.command(
    "add",
    epilog=examples(
        'lightyear-node peers add --federation lungs --rounds 50 "$(lightyear-node id)"',
        "lightyear-node peers add 'lightyear-join:…'",
    ),
)
def add(
    join: Annotated[list[str], typer.Argument(help="Join lines, as `lightyear-node id` prints.")],
    peers: PeersOption = PEERS_NAME,
    federation: Annotated[
        str | None, typer.Option(help="The federation's name, when the file is begun.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="How many rounds to run.", min=1)] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Add sites to peers.yaml, or begin it.  Give every site the same file.

    A new certificate of a site that is there already is added beside the old one.
    """
    from lightyear_node.joining import parse_join_line
    from lightyear_node.peers_file import add_peers

    sites = [parse_join_line(line) for line in join]
    agreement = add_peers(peers, sites, federation, rounds)
    added = [
        {"name": site.name, "fingerprint": site.certificate.fingerprint, "address": site.address}
        for site in sites
    ]

    def for_people() -> None:
        for site in added:
            typer.echo(f"{site['name']} {site['fingerprint']}")

    show(format, {**_whole(agreement), "added": added}, for_people)
    _say_who_is_there(peers, agreement)


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
        typer.Option(help="Remove only this one of its two certificates: SHA256:…"),
    ] = None,
    peers: PeersOption = PEERS_NAME,
    format: FormatOption = Format.TABLE,
) -> None:
    """Remove a site from peers.yaml, or its old certificate.  Running nodes act on it at once."""
    from lightyear_node.config.agreement import load_agreement
    from lightyear_node.peers_file import remove_peer

    _find(peers, load_agreement(peers), name)
    agreement = remove_peer(peers, name, fingerprint)
    show(format, _whole(agreement), lambda: None)
    _say_who_is_there(peers, agreement)


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
    """Who is in peers.yaml, and how each is doing, if a node runs here."""
    from lightyear_node.config.agreement import load_agreement

    agreement = load_agreement(_file(home, peers))
    status = running(home)
    rows = [_row(peer, status) for peer in agreement.peers]
    data = {
        "federation": agreement.federation,
        "source": "files" if status is None else "node",
        "peers": rows,
    }
    show(format, data, lambda: _list(data), rows=rows)


@peers_app.command("show", epilog=examples("lightyear-node peers show site-b"))
def show_peer(
    name: PeerArgument,
    home: HomeOption = Path(),
    peers: PeersOption = PEERS_NAME,
    format: FormatOption = Format.TABLE,
) -> None:
    """All that is known here of one site: its certificates, its state, how it was judged."""
    from lightyear_node.config.agreement import load_agreement
    from lightyear_node.home import pinned_certificates

    path = _file(home, peers)
    peer = _find(path, load_agreement(path), name)
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
    show(format, data, lambda: _show(data))


def _file(home: Path, peers: Path) -> Path:
    """The one that was named, or is here; else the one in the node's folder."""
    beside = home / PEERS_NAME
    return beside if peers == PEERS_NAME and not peers.exists() and beside.exists() else peers


def _find(path: Path, agreement: Agreement, name: str) -> Peer:
    found = next((peer for peer in agreement.peers if peer.name == name), None)
    if found is None:
        raise unknown_peer(str(path), name, [peer.name for peer in agreement.peers])
    return found


def _whole(agreement: Agreement) -> dict[str, Any]:
    peers = [_row(peer, None) for peer in agreement.peers]
    return {"federation": agreement.federation, "peers": peers}


def _row(peer: Peer, status: Mapping[str, Any] | None) -> dict[str, Any]:
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


def _say_who_is_there(path: Path, agreement: Agreement) -> None:
    names = ", ".join(peer.name for peer in agreement.peers) or "nobody"
    typer.echo(f"{path}: federation {agreement.federation} with {names}", err=True)


def _judged(home: Path, name: str) -> dict[str, Any] | None:
    """What the record says of all rounds; None where there is no record."""
    from lightyear_node.config.site import NODE_FILE
    from lightyear_node.errors import LightyearError

    if not (home / NODE_FILE).exists():
        return None
    try:
        entries = recorded(home)
    except LightyearError:  # not begun yet; or `audit verify` says what is wrong with it
        return None
    found = [
        {"round": number, **verdict}
        for number, entry in sorted(entries.items())
        for verdict in entry.to_plain()["verdicts"]
        if verdict["peer"] == name
    ]
    last = found[-1] if found else None
    return {
        **dict.fromkeys(MARKS, 0),
        **Counter(one["fate"] for one in found),
        "last": last and {key: last[key] for key in ("round", "fate", "reason", "score")},
    }


def _list(data: Mapping[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    seen = data["source"] == "node"
    table = Table("peer", "address", box=None)
    if seen:
        for heading in ("state", "verdict", "agreement"):
            table.add_column(heading)
    table.add_column("fingerprint", no_wrap=True)
    for row in data["peers"]:
        cells = [Text(row["name"]), Text(row["address"] or "it calls us")]
        if seen:
            cells += _doing(row)
        table.add_row(*cells, Text("\n".join(row["fingerprint"])))
    out = console()
    out.print(table)
    if not seen:
        typer.echo("no node runs here: this is what the file says", err=True)


def _doing(row: Mapping[str, Any]) -> list[Any]:
    from rich.text import Text

    seen = row["seen"]
    if seen is None:
        return [Text("this site" if row["us"] else "", "dim"), Text(), Text()]
    state = (
        "blocked" if row["blocked"] else "in quarantine" if row["quarantined"] else seen["state"]
    )
    verdict = seen["verdict"]
    return [
        Text(state),
        Text(MARKS.get(verdict, ""), STYLES.get(verdict, "")),
        Text(agreement_words(seen, None)),
    ]


def _show(data: Mapping[str, Any]) -> None:
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
        line("state", "this site itself: `lightyear-node status` says more")
    for mark, words in (("blocked", "unblock"), ("quarantined", "unquarantine")):
        if data.get(mark):
            line(mark, f"`lightyear-node peers {words} {data['name']}` ends it", "red")
    if data.get("seen"):
        _show_seen(data, line)
    judged = data["judged"]
    if judged is not None and judged["last"]:
        line("judged", ", ".join(f"{judged[fate]} × {fate}" for fate in MARKS))
        last = judged["last"]
        line("last", f"round {last['round']}: {last['fate']} ({last['reason']})")
        line("why", f"lightyear-node explain --round {last['round']} --peer {data['name']}")


def _show_seen(data: Mapping[str, Any], line: Any) -> None:
    from lightyear_node.observe.words import progress_words

    seen = data["seen"]
    line("state", state_words(seen))
    if seen["round"] is not None:
        line("it is at", f"round {seen['round']}, {seen['phase']}")
    if data["transfer"]:
        line("transfer", progress_words(data["transfer"], weights=True))
    if seen["verdict"]:
        verdict = f"{MARKS[seen['verdict']]} in round {seen['verdict_round']} ({seen['reason']})"
        line("verdict", verdict, STYLES[seen["verdict"]])
    if seen["agreement"] is not None:
        line("agreement", agreement_words(seen, data["threshold"]))
    if seen["rejected_in_a_row"]:
        line("rejected", f"{seen['rejected_in_a_row']} times in a row", "red")
