"""`audit`: verify this site's journal, export it, and compare it with those of other sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightyear_node.cli import EXIT_UNHEALTHY, audit_app
from lightyear_node.cli.common import (
    Format,
    FormatOption,
    HomeOption,
    examples,
    load_site,
    node_config,
    show,
    state_dir_of,
)
from lightyear_node.errors import ConfigError, LightyearError, PeerError, StoreError
from lightyear_node.types import PeerName

if TYPE_CHECKING:
    from lightyear_node.audit.compare import Comparison
    from lightyear_node.audit.export import RecordSource
    from lightyear_node.audit.verify import Audit
    from lightyear_node.identity.keys import Certificate
    from lightyear_node.types import SignedHead

    Answers = dict[PeerName, SignedHead | PeerError | None]


class ExportFormat(StrEnum):
    JSONL = "jsonl"
    CSV = "csv"


PeersChoice = Annotated[
    Path | None,
    typer.Option(
        "--peers",
        help="peers.yaml: ask every reachable peer for the head of our journal that it holds;"
        " with --export, take the site's certificate from it instead.",
    ),
]


@audit_app.command(
    "verify",
    epilog=examples(
        "lightyear-node audit verify",
        "lightyear-node audit verify --peers peers.yaml",
        "lightyear-node audit verify --export site-b.jsonl --certificate site-b.crt",
    ),
)
def verify(
    home: HomeOption = Path(),
    peers: PeersChoice = None,
    export: Annotated[
        Path | None,
        typer.Option(help="Verify this export or copy of a state directory instead."),
    ] = None,
    certificate: Annotated[
        list[Path] | None,
        typer.Option(help="Further certificate (PEM) whose signing key is trusted; repeatable."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for each peer.", min=0.1, max=60)
    ] = 5.0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Verify hashes and signatures; if a record is bad, report the first one and exit with 3."""
    from lightyear_node.audit.export import open_records
    from lightyear_node.audit.verify import verify as verify_journal

    where = export or state_dir_of(home)
    held: Answers = {}
    if peers is not None and export is None:
        # Before our own journal is read: it may grow in the meantime.
        held = _ask(home, peers, timeout)
    with open_records(where, thoroughly=True) as source:
        site = verify_journal(source, []).site if export else None
        pinned = _certificates(home, export, site, peers, certificate)
        keys = [one.signing_key for one in pinned]
        audit = verify_journal(source, keys)
        asked = [_claimed(source, audit, peer, head, keys) for peer, head in held.items()]
    ok = audit.finding is None and all(one["ok"] is not False for one in asked)
    data = {"ok": ok, **_plain(audit), "peers": asked}
    show(format, data, lambda: _print_audit(where, audit, asked, signatures=bool(keys)))
    if not ok:
        raise typer.Exit(EXIT_UNHEALTHY)


@audit_app.command("head", epilog=examples("lightyear-node audit head"))
def head(home: HomeOption = Path(), format: FormatOption = Format.TABLE) -> None:
    """Print the newest signed head: number and hash, which cover all records up to it."""
    from lightyear_node.audit.export import open_records

    with open_records(state_dir_of(home)) as source:
        heads = source.heads
    if not heads:
        raise ConfigError(
            "nothing has been signed here yet", hint="the first completed round is signed"
        )
    seq = max(heads)
    hash, signature = heads[seq]
    data = {"seq": seq, "hash": hash, "signature": signature}
    show(format, data, lambda: typer.echo(f"{seq}\t{hash}\t{signature}"))


@audit_app.command(
    "export",
    epilog=examples(
        "lightyear-node audit export -o site-a.jsonl",
        "lightyear-node audit export --format csv --from-round 10 -o site-a.csv",
    ),
)
def export_record(
    home: HomeOption = Path(),
    format: Annotated[
        ExportFormat, typer.Option("--format", help="jsonl, or csv for spreadsheets.")
    ] = ExportFormat.JSONL,
    from_round: Annotated[int | None, typer.Option(help="First round.", min=0)] = None,
    to_round: Annotated[int | None, typer.Option(help="Last round.", min=0)] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; default: standard output."),
    ] = None,
) -> None:
    """Write the journal with its hashes and signatures, so that it can be verified elsewhere."""
    import io

    from lightyear_node.audit.export import export_lines, open_records, write_csv, write_jsonl

    write = write_csv if format is ExportFormat.CSV else write_jsonl
    text = io.StringIO(newline="")
    with open_records(state_dir_of(home)) as source:
        count = write(export_lines(source, from_round, to_round), text)
    if not count:
        raise ConfigError(
            "there are no records of these rounds",
            hint="`lightyear-node rounds list` shows the recorded ones",
        )
    if output is None:
        typer.echo(text.getvalue(), nl=False)
        return
    try:
        output.write_text(text.getvalue(), encoding="utf-8", newline="")
    except OSError as problem:
        raise StoreError(
            f"{output} cannot be written: {problem.strerror}", hint="name another file with -o"
        ) from None
    typer.echo(f"{output}: {count} records", err=True)


@audit_app.command(
    "compare", epilog=examples("lightyear-node audit compare site-a.jsonl site-b.jsonl")
)
def compare(
    first: Annotated[Path, typer.Argument(help="One site's export or state directory.")],
    second: Annotated[Path, typer.Argument(help="The other site's.")],
    format: FormatOption = Format.TABLE,
) -> None:
    """Compare two sites' journals of the same rounds; exit with 3 if they differ."""
    from lightyear_node.audit.compare import compare as compare_journals
    from lightyear_node.audit.export import open_records

    with open_records(_state_in(first)) as left, open_records(_state_in(second)) as right:
        found = compare_journals(left, right, (str(first), str(second)))
    different = found.first
    if different is None and not found.updates + found.heads:
        raise LightyearError(
            f"{found.sites[0]} and {found.sites[1]} have no update in common: nothing was compared",
            hint="give journals of the same rounds; each must contain a completed round",
        )
    data = {**asdict(found), "ok": different is None, "first": different and asdict(different)}
    show(format, data, lambda: _print_comparison(found))
    if different is not None:
        raise typer.Exit(EXIT_UNHEALTHY)


def _state_in(path: Path) -> Path:
    """For a node's folder, return the state directory that its settings name."""
    from lightyear_node.config.node import NODE_FILE

    return state_dir_of(path) if (path / NODE_FILE).exists() else path


def _certificates(
    home: Path,
    export: Path | None,
    site: str | None,
    peers: Path | None,
    given: Sequence[Path] | None,
) -> list[Certificate]:
    """Return the trusted certificates: our own, or those given for the export of another site."""
    paths = list(given or [])
    if export is None:
        paths.append(home / node_config(home).keys_dir / "tls.crt")
    found = [_certificate(path) for path in paths]
    if export is not None and peers is not None:
        found += _pinned(peers, site)
    return found


def _certificate(path: Path) -> Certificate:
    import ssl

    from lightyear_node.identity.keys import CERTIFICATE_BYTES_MAX, Certificate

    try:
        with path.open(encoding="ascii", errors="replace") as file:
            pem = file.read(CERTIFICATE_BYTES_MAX * 2)
        der = ssl.PEM_cert_to_DER_cert(pem.strip())
    except OSError as problem:
        raise ConfigError(
            f"{path} cannot be read: {problem.strerror}",
            hint="signatures are verified with the site's certificate: give it with --certificate"
            " together with --export",
        ) from None
    except ValueError:
        raise ConfigError(
            f"{path} is no certificate", hint="give the site's keys/tls.crt, created by `init`"
        ) from None
    return Certificate.parse(der)


def _pinned(peers: Path, site: str | None) -> list[Certificate]:
    from lightyear_node.config.federation import load_federation_config
    from lightyear_node.node.home import pinned_certificates

    config = load_federation_config(peers)
    peer = next((one for one in config.peers if one.name == site), None)
    if peer is None:
        names = ", ".join(one.name for one in config.peers)
        raise ConfigError(f"{peers} has no peer `{site}`", hint=f"it has: {names}")
    return list(pinned_certificates(peers, peer))


def _ask(home: Path, peers: Path, timeout_s: float) -> Answers:
    """Ask each peer for the head of our journal that it holds."""
    import asyncio

    from lightyear_node.tools.preflight import fetch_heads, remembered_model

    ours = load_site(home, peers)
    model = remembered_model(ours)
    return asyncio.run(fetch_heads(ours, ours.others, model, timeout_s=timeout_s))


def _claimed(
    source: RecordSource,
    audit: Audit,
    peer: PeerName,
    held: SignedHead | PeerError | None,
    keys: Sequence[bytes],
) -> dict[str, Any]:
    """Check that our journal contains the head that a peer holds; `ok` is None if unknown."""
    from lightyear_node.audit.verify import head_contradiction
    from lightyear_node.protocol.signing import verify_head

    ok: bool | None = None
    site, federation = PeerName(audit.site or ""), audit.federation or ""
    if isinstance(held, PeerError):
        about = f"could not be asked: {held.about}"
    elif held is None:
        about = "holds no head of our journal yet"
    elif not any(verify_head(held, federation, site, key) for key in keys):
        about = f"claims record {held.seq}, but that head was not signed here"
    elif held.seq < source.first_seq:
        about = f"holds record {held.seq}, which is in a closed segment that is not here"
    else:
        length = audit.last_seq
        if audit.finding is not None:
            length = max((row.seq for row in source.rows()), default=0)
        problem = head_contradiction(peer, held, length=length, found=source.hash_of(held.seq))
        ok = problem is None
        about = problem or f"holds record {held.seq}, which is in our journal as it was then"
    return {"peer": peer, "ok": ok, "about": about}


def _plain(audit: Audit) -> dict[str, Any]:
    return {
        "site": audit.site,
        "federation": audit.federation,
        "records": audit.last_seq - audit.first_seq + 1,
        "rounds": audit.rounds,
        "signed": audit.signed,
        "head": {"seq": audit.last_seq, "hash": audit.hash},
        "finding": asdict(audit.finding) if audit.finding else None,
        "absent": list(audit.absent),
    }


def _print_comparison(found: Comparison) -> None:
    different = found.first
    if different is None:
        typer.echo(
            f"{found.sites[0]} and {found.sites[1]} agree: {found.rounds} rounds,"
            f" {found.updates} updates and {found.heads} heads compared"
            + (f"; {found.uncovered} are in one record only" if found.uncovered else "")
        )
        return
    typer.echo(f"they differ: {different.about}")
    typer.echo(f"  what it means: {different.advice}")
    if len(found.differences) > 1:
        typer.echo(f"  and {len(found.differences) - 1} more, in this round or later")


def _print_audit(
    where: Path, audit: Audit, asked: Sequence[dict[str, Any]], *, signatures: bool
) -> None:
    from lightyear_node.audit.verify import RESTORE

    finding = audit.finding
    if finding is not None:
        when = "" if finding.round is None else f", in or after round {finding.round}"
        typer.echo(f"bad: {finding.about}{when}")
        typer.echo(f"  what to do: {finding.advice}")
        if audit.last_seq >= audit.first_seq:
            typer.echo(f"  records {audit.first_seq} to {audit.last_seq} hold")
    else:
        checked = f"{audit.signed} of them with a verified signature"
        typer.echo(
            f"{where}: records {audit.first_seq} to {audit.last_seq} of {audit.site} hold;"
            f" {audit.rounds} completed rounds,"
            f" {checked if signatures else 'signatures not checked (give --certificate)'}"
        )
        typer.echo(f"  head: {audit.last_seq} {audit.hash}")
    if audit.absent:
        files = audit.absent[0] + (f" to {audit.absent[-1]}" if len(audit.absent) > 1 else "")
        typer.echo(
            f"  records before {audit.first_seq} were not verified: {files} is not here; put it"
            " back from the archive to verify all"
        )
    signs = {True: "✓", False: "✗", None: "–"}
    for one in asked:
        typer.echo(f"  {signs[one['ok']]} {one['peer']}: {one['about']}")
    if any(one["ok"] is False for one in asked):
        typer.echo(f"  what to do: {RESTORE}")
