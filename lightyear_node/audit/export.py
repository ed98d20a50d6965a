"""Exports a journal to a file with one line per record, which can be verified on its own.

Every line has the hash of the line before and its own; a line that completes a round also has the
site's signature of its hash.  The hash covers `seq`, `wall_ns`, `lamport`, `round`, `kind` and
`body`; `site`, `federation` and `time` are for the reader.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lightyear_node.audit.rounds import timestamp
from lightyear_node.audit.verify import name, sealed_by
from lightyear_node.errors import ConfigError
from lightyear_node.storage.hash_chain import FIRST_HASH, StoredRecord, broken_links, canonical
from lightyear_node.storage.journal_reader import JournalSnapshot, reading

COLUMNS = (
    *("site", "federation", "seq", "time", "wall_ns", "lamport", "round", "kind", "body"),
    *("before", "hash", "signature"),
)
_NUMBERS = ("seq", "wall_ns", "lamport", "round")
LINE_CHARS_MAX = 64 << 20
"""Limits the memory for a file that is no export; our lines have a few kB per site."""
JOURNAL = "journal.db"


@dataclass(frozen=True, slots=True)
class ExportLine:
    """One line of an export."""

    row: StoredRecord
    before: str
    signature: str | None
    site: str | None
    federation: str | None

    def to_plain(self) -> dict[str, Any]:
        row = self.row
        return {
            "site": self.site,
            "federation": self.federation,
            "seq": row.seq,
            "time": timestamp(row.wall_ns),
            "wall_ns": row.wall_ns,
            "lamport": row.lamport,
            "round": row.round,
            "kind": row.kind,
            "body": row.body,
            "before": self.before,
            "hash": row.hash,
            "signature": self.signature,
        }


def export_lines(
    source: RecordSource, first_round: int | None, last_round: int | None
) -> Iterator[ExportLine]:
    """Yield all lines from the first to the last record of these rounds, as the chain needs."""
    first = last = None
    for index, row in enumerate(source.rows()):
        if _within(row.round, first_round, last_round):
            first, last = index if first is None else first, index
    before, heads = source.before, source.heads
    site, federation = source.site, source.federation
    for index, row in enumerate(source.rows()):
        body = row.plain_body() if row.kind in ("start", "seal") else {}
        if row.kind == "start" and "signing_key" in body:
            site, federation = name(body.get("site")), name(body.get("federation"))
        elif row.kind == "seal":
            site = site or sealed_by(row)
        if first is not None and last is not None and first <= index <= last:
            signature = heads.get(row.seq, (None, None))[1]
            yield ExportLine(row, before, signature, site, federation)
        before = row.hash


def _within(round: Any, first: int | None, last: int | None) -> bool:
    if type(round) is not int:
        return first is None and last is None
    return (first is None or round >= first) and (last is None or round <= last)


def write_jsonl(lines: Iterable[ExportLine], out: TextIO) -> int:
    """Write the lines; a body is an object, unless its stored text is not canonical."""
    count = 0
    for line in lines:
        plain = line.to_plain()
        body = line.row.plain_body()
        if canonical(body) == line.row.body:
            plain["body"] = body
        out.write(json.dumps(plain) + "\n")
        count += 1
    return count


def write_csv(lines: Iterable[ExportLine], out: TextIO) -> int:
    table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    table.writeheader()
    count = 0
    for line in lines:
        table.writerow(line.to_plain())
        count += 1
    return count


class ReadExport:
    """An export that was read back, with the interface of the journal it was made from."""

    newest = None
    memory = None
    mark = None
    absent = altered = ()
    """Only journals have these."""

    def __init__(self, lines: list[ExportLine]) -> None:
        first = lines[0]
        self._lines = lines
        self.before = first.before
        self.first_seq: int = first.row.seq
        self.site, self.federation = first.site, first.federation
        self.heads: Mapping[int, tuple[Any, Any]] = {
            line.row.seq: (line.row.hash, line.signature) for line in lines if line.signature
        }
        self._hashes = {line.row.seq: line.row.hash for line in lines}

    def rows(self) -> Iterator[StoredRecord]:
        return (line.row for line in self._lines)

    def hash_of(self, seq: int) -> str | None:
        return self._hashes.get(seq)


RecordSource = JournalSnapshot | ReadExport
"""What can be verified, exported and compared."""


def read_export(path: Path) -> ReadExport:
    """Read an export; raises ConfigError for other files.  Does not verify it."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise ConfigError(
            f"{path} cannot be read: {problem.strerror}", hint="name an export or a state directory"
        ) from None
    jsonl = text.lstrip()[:1] == "{"
    found: list[ExportLine] = []
    try:
        for number, plain in enumerate(_jsonl(text) if jsonl else _csv(path, text), 1):
            found.append(_line(path, number, plain))
    except csv.Error as problem:
        raise _not_an_export(path, f"it is not CSV: {problem}") from None
    if not found:
        raise _not_an_export(path, "it has no records")
    first = found[0]
    if first.row.seq == 1 and first.before != FIRST_HASH:
        raise _not_an_export(path, "its first record names one before it")
    if len({line.site for line in found} - {None}) > 1:
        raise _not_an_export(path, "its lines belong to several sites")
    return ReadExport(found)


def _jsonl(text: str) -> Iterator[Any]:
    for line in text.splitlines():
        try:
            yield json.loads(line) if len(line) <= LINE_CHARS_MAX else None
        except (ValueError, RecursionError):
            yield None


def _csv(path: Path, text: str) -> Iterator[Any]:
    csv.field_size_limit(LINE_CHARS_MAX)
    table = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    if tuple(table.fieldnames or ()) != COLUMNS:
        raise _not_an_export(path, f"its columns are not {', '.join(COLUMNS)}")
    for plain in table:
        values: dict[str, Any] = {column: value or None for column, value in plain.items()}
        yield values | {column: _whole(values[column]) for column in _NUMBERS}


def _whole(text: Any) -> Any:
    try:
        return int(text)
    except (TypeError, ValueError):
        return text  # `verify` refuses it


def _line(path: Path, number: int, plain: Any) -> ExportLine:
    if not isinstance(plain, dict) or not set(COLUMNS) <= set(plain):
        raise _not_an_export(path, f"line {number} lacks columns or was cut off")
    body = plain["body"]
    try:
        text = canonical(body) if isinstance(body, dict) else body
    except (ValueError, RecursionError):
        raise _not_an_export(path, f"line {number} has an invalid body") from None
    seq, wall_ns, lamport, round = (plain[column] for column in _NUMBERS)
    row = StoredRecord(seq, wall_ns, lamport, round, plain["kind"], text, plain["hash"])
    texts = ("before", "hash", "kind")
    if type(row.seq) is not int or not all(isinstance(plain[column], str) for column in texts):
        raise _not_an_export(path, f"line {number} has no number, kind or hash")
    if plain["time"] != timestamp(row.wall_ns):
        raise _not_an_export(path, f"`time` and `wall_ns` of line {number} differ")
    signature, site, federation = (plain[column] for column in ("signature", "site", "federation"))
    if not isinstance(signature, str | None):
        raise _not_an_export(path, f"the signature in line {number} is not a string")
    if name(site) != site or name(federation) != federation:
        raise _not_an_export(path, f"line {number} has an invalid site or federation name")
    return ExportLine(row, plain["before"], signature, site, federation)


def _not_an_export(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is not an export of a journal: {why}",
        hint="`lightyear-node audit export -o FILE` writes one; a state directory works, too",
    )


@contextmanager
def open_records(
    path: Path, *, thoroughly: bool = False, live_only: bool = False
) -> Iterator[RecordSource]:
    """Open a state directory, a journal, one of its closed segments, or an export."""
    if path.is_dir():
        path = path / JOURNAL
        if not path.exists():
            raise ConfigError(
                f"{path.parent} is not a state directory: it has no {JOURNAL}",
                hint="name the `state_dir` of a node that has run, or set --home to its folder",
            )
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist",
            hint="name an export or a state directory; a node creates its own at its first start in"
            " the folder given by --home",
        )
    if path.suffix == ".db" or _is_database(path):
        with reading(path, thoroughly=thoroughly, live_only=live_only) as copy:
            yield copy
    else:
        yield read_export(path)


def valid_rows(source: RecordSource) -> tuple[list[StoredRecord], StoredRecord | None]:
    """The records before the first one that breaks the hash chain, and that one."""
    rows = list(source.rows())
    bad = next(broken_links(rows, source.before, source.first_seq), None)
    return (rows, None) if bad is None else (rows[: rows.index(bad)], bad)


def _is_database(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(16) == b"SQLite format 3\0"
    except OSError:
        return False
