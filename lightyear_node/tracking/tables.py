"""`rounds.jsonl`, `rounds.csv` and `verdicts.csv` in the state directory.

Each is what the journal would give, byte for byte: looked at when the node starts, appended to with
every round, and written anew where it is missing, short, damaged or lacks a column.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lightyear_node.history import Entry
from lightyear_node.tracking import Astray
from lightyear_node.tracking.flat import Value, finite, round_row, verdict_rows

Row = dict[str, Value]


class _File:
    """A file of which we know how long it is, and to which text is only ever added."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path = path
        self._size = -1
        self._round = -1

    def _agree(self, text: str, rounds: Sequence[Entry]) -> None:
        content = text.encode()
        if not self._path.exists() or self._path.read_bytes() != content:
            part = self._path.with_name(f"{self._path.name}.part")
            try:
                part.write_bytes(content)
                part.replace(self._path)
            finally:
                part.unlink(missing_ok=True)
        self._size = len(content)
        self._round = max((entry["round"] for entry in rounds), default=-1)

    def _append(self, text: str, entry: Entry) -> None:
        if entry["round"] <= self._round or not self._path.exists():
            raise Astray
        with self._path.open("ab", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != self._size:
                raise Astray
            content = text.encode()
            # The last write before a disk is full is short.
            if file.write(content) != len(content):
                raise OSError("the disk is full")
        self._size += len(content)
        self._round = entry["round"]

    def close(self) -> None:
        pass


class JsonLines(_File):
    """One object per round, with its verdicts."""

    def begin(self, rounds: Sequence[Entry]) -> None:
        self._agree("".join(map(_json_line, rounds)), rounds)

    def add(self, entry: Entry) -> None:
        self._append(_json_line(entry), entry)


class Csv(_File):
    """One or more lines per round; a new column makes a new file."""

    def __init__(self, path: Path, rows_of: Callable[[Entry], Sequence[Row]]) -> None:
        super().__init__(path)
        self._rows_of = rows_of
        self._columns: list[str] = []

    def begin(self, rounds: Sequence[Entry]) -> None:
        rows = [row for entry in rounds for row in self._rows_of(entry)]
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        head = _csv_text(self._columns, [dict(zip(self._columns, self._columns, strict=True))])
        self._agree((head if rows else "") + _csv_text(self._columns, rows), rounds)

    def add(self, entry: Entry) -> None:
        rows = self._rows_of(entry)
        if any(name not in self._columns for row in rows for name in row):
            raise Astray
        self._append(_csv_text(self._columns, rows), entry)


def tables(state_dir: Path) -> list[JsonLines | Csv]:
    return [
        JsonLines(state_dir / "rounds.jsonl"),
        Csv(state_dir / "rounds.csv", lambda entry: [round_row(entry)]),
        Csv(state_dir / "verdicts.csv", verdict_rows),
    ]


def _json_line(entry: Entry) -> str:
    verdicts = [finite(row) for row in verdict_rows(entry)]
    return json.dumps({**finite(round_row(entry)), "verdicts": verdicts}) + "\n"


def _csv_text(columns: Sequence[str], rows: Sequence[Row]) -> str:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()
