"""A record as a file for others: one line for each entry, which can be verified without the node.

Every line carries the hash of the one before and its own; a line that completes a round also the
site's signature of that.  The chain is over `seq`, `wall_ns`, `lamport`, `round`, `kind` and
`body`; `site`, `federation` and `time` are there for the reader.
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
from lightyear_node.audit.verify import Source, name, sealed_by
from lightyear_node.errors import ConfigError
from lightyear_node.journal import FIRST_HASH, Row, canonical, reading

COLUMNS = (
    *("site", "federation", "seq", "time", "wall_ns", "lamport", "round", "kind", "body"),
    *("before", "hash", "signature"),
)
_NUMBERS = ("seq", "wall_ns", "lamport", "round")
LINE_CHARS_MAX = 64 << 20
"""Ours have some kilobytes for each site; the limit keeps a file that is no export from memory."""
JOURNAL = "journal.db"


@dataclass(frozen=True, slots=True)
class Line:
    """One row of an export, in the words of its columns."""

    row: Row
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


def lines_of(source: Source, first_round: int | None, last_round: int | None) -> Iterator[Line]:
    """Those between the rounds' first and last record, without a gap: the chain has to hold."""
    rows = list(source.rows())
    numbers = [at for at, row in enumerate(rows) if _within(row.round, first_round, last_round)]
    before = source.before
    site, federation = source.site, source.federation
    for at, row in enumerate(rows):
        body = row.plain_body()
        if row.kind == "start" and "signing_key" in body:
            site, federation = name(body.get("site")), name(body.get("federation"))
        elif row.kind == "seal":
            site = site or sealed_by(row)
        if numbers and numbers[0] <= at <= numbers[-1]:
            signature = source.heads.get(row.seq, (None, None))[1]
            yield Line(row, before, signature, site, federation)
        before = row.hash


def _within(round: Any, first: int | None, last: int | None) -> bool:
    if type(round) is not int:
        return first is None and last is None
    return (first is None or round >= first) and (last is None or round <= last)


def write_jsonl(lines: Iterable[Line], out: TextIO) -> int:
    """A body is an object in its line, unless somebody has made it something else."""
    count = 0
    for line in lines:
        plain = line.to_plain()
        said = line.row.plain_body()
        if canonical(said) == line.row.body:
            plain["body"] = said
        out.write(json.dumps(plain) + "\n")
        count += 1
    return count


def write_csv(lines: Iterable[Line], out: TextIO) -> int:
    table = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    table.writeheader()
    count = 0
    for line in lines:
        table.writerow(line.to_plain())
        count += 1
    return count


class Exported:
    """An export that was read back: a source like the journal it was made from."""

    newest = None
    memory = None

    def __init__(self, lines: list[Line]) -> None:
        first = lines[0]
        self._lines = lines
        self.before = first.before
        self.first_seq: int = first.row.seq
        self.site, self.federation = first.site, first.federation
        self.heads: Mapping[int, tuple[Any, Any]] = {
            line.row.seq: (line.row.hash, line.signature) for line in lines if line.signature
        }
        self._hashes = {line.row.seq: line.row.hash for line in lines}

    def rows(self) -> Iterator[Row]:
        return (line.row for line in self._lines)

    def hash_of(self, seq: int) -> str | None:
        return self._hashes.get(seq)


def read_export(path: Path) -> Exported:
    """Raises for a file that is no export; what an export says is for `verify` to believe."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise ConfigError(
            f"{path} cannot be read: {problem.strerror}", hint="name an export or a state directory"
        ) from None
    jsonl = text.lstrip()[:1] == "{"
    found: list[Line] = []
    try:
        for number, plain in enumerate(_jsonl(text) if jsonl else _csv(path, text), 1):
            found.append(_line(path, number, plain))
    except csv.Error as problem:
        raise _no_export(path, f"it is no CSV: {problem}") from None
    if not found:
        raise _no_export(path, "it has no records")
    first = found[0]
    if first.row.seq == 1 and first.before != FIRST_HASH:
        raise _no_export(path, "its first record claims that there is one before it")
    if len({line.site for line in found} - {None}) > 1:
        raise _no_export(path, "its lines are of several sites")
    return Exported(found)


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
        raise _no_export(path, f"its columns are not {', '.join(COLUMNS)}")
    for plain in table:
        said: dict[str, Any] = {column: value or None for column, value in plain.items()}
        yield said | {column: _whole(said[column]) for column in _NUMBERS}


def _whole(text: Any) -> Any:
    try:
        return int(text)
    except (TypeError, ValueError):
        return text  # which `verify` will not believe


def _line(path: Path, number: int, plain: Any) -> Line:
    if not isinstance(plain, dict) or not set(COLUMNS) <= set(plain):
        raise _no_export(path, f"line {number} is not one of an export, or was cut off")
    body = plain["body"]
    try:
        text = canonical(body) if isinstance(body, dict) else body
    except (ValueError, RecursionError):
        raise _no_export(path, f"line {number} has a body that no site would write") from None
    seq, wall_ns, lamport, round = (plain[column] for column in _NUMBERS)
    row = Row(seq, wall_ns, lamport, round, plain["kind"], text, plain["hash"])
    words = ("before", "hash", "kind")
    if type(row.seq) is not int or not all(isinstance(plain[word], str) for word in words):
        raise _no_export(path, f"line {number} has no number, kind or hash")
    if plain["time"] != timestamp(row.wall_ns):
        raise _no_export(path, f"line {number} says another `time` than its `wall_ns`")
    signature, site, federation = (plain[word] for word in ("signature", "site", "federation"))
    if not isinstance(signature, str | None):
        raise _no_export(path, f"line {number} has a signature that is no text")
    if name(site) != site or name(federation) != federation:
        raise _no_export(path, f"line {number} has a site or federation that is no name")
    return Line(row, plain["before"], signature, site, federation)


def _no_export(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} is no export of a record: {why}",
        hint="`lightyear-node audit export -o FILE` writes one; a state directory does, too",
    )


@contextmanager
def opened(path: Path, *, thoroughly: bool = False) -> Iterator[Source]:
    """A state directory, a journal or an export."""
    if path.is_dir():
        path = path / JOURNAL
        if not path.exists():
            raise ConfigError(
                f"{path.parent} is no state directory: it has no {JOURNAL}",
                hint="name the `state_dir` of a node that has run, or set --home to its folder",
            )
    if not path.exists():
        raise ConfigError(
            f"{path} is not there",
            hint="name an export or a state directory; a node's own is made when it first runs in"
            " the folder that --home names",
        )
    if path.suffix == ".db" or _is_database(path):
        with reading(path, thoroughly=thoroughly) as copy:
            yield copy
    else:
        yield read_export(path)


def _is_database(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(16) == b"SQLite format 3\0"
    except OSError:
        return False
