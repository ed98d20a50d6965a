"""`rounds.jsonl`, `rounds.csv` and `verdicts.csv` in the state directory.

Each equals what the journal yields, byte for byte: it is checked when the node starts, appended to
after every round, and rebuilt if it is missing, truncated, damaged or lacks a column.  Of a long
journal, only the newest rounds are checked.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from lightyear_node.integrations.tracking import OutOfStep
from lightyear_node.integrations.tracking.flat_rows import Value, finite, round_row, verdict_rows
from lightyear_node.storage.atomic_files import write_file
from lightyear_node.storage.history import Entry

Row = dict[str, Value]


class _AppendedFile:
    """A file of known size, to which text is only appended."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path = path
        self._size = -1
        self._round = -1

    def _ends_with(self, text: str, rounds: Sequence[Entry]) -> bool:
        content = text.encode()
        size = self._path.stat().st_size
        with self._path.open("rb") as file:
            file.seek(max(0, size - len(content) - 1))
            if file.read() != b"\n" + content:
                return False
        self._size, self._round = size, rounds[-1]["round"]
        return True

    def _set_content(self, text: str, rounds: Sequence[Entry]) -> None:
        content = text.encode()
        if not self._path.exists() or self._path.read_bytes() != content:
            write_file(self._path, content)
        self._size = len(content)
        self._round = max((entry["round"] for entry in rounds), default=-1)

    def _append(self, text: str, entry: Entry) -> None:
        if entry["round"] <= self._round or not self._path.exists():
            raise OutOfStep
        with self._path.open("ab", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != self._size:
                raise OutOfStep
            content = text.encode()
            # The last write before the disk is full is incomplete.
            if file.write(content) != len(content):
                raise OSError("the disk is full")
        self._size += len(content)
        self._round = entry["round"]

    def close(self) -> None:
        pass


class JsonLines(_AppendedFile):
    """One object per round, with its verdicts."""

    def resume(self, recent: Sequence[Entry]) -> bool:
        return self._ends_with("".join(map(_json_line, recent)), recent)

    def rebuild(self, rounds: Sequence[Entry]) -> None:
        self._set_content("".join(map(_json_line, rounds)), rounds)

    def add(self, entry: Entry) -> None:
        self._append(_json_line(entry), entry)


class Csv(_AppendedFile):
    """One or more lines per round; a new column causes a rebuild."""

    def __init__(self, path: Path, rows_of: Callable[[Entry], Sequence[Row]]) -> None:
        super().__init__(path)
        self._rows_of = rows_of
        self._columns: list[str] = []

    def resume(self, recent: Sequence[Entry]) -> bool:
        rows = [row for entry in recent for row in self._rows_of(entry)]
        with self._path.open(newline="", encoding="utf-8") as file:
            columns = next(csv.reader(file), [])
        if not rows or any(name not in columns for row in rows for name in row):
            return False
        self._columns = columns
        return self._ends_with(_csv_text(columns, rows), recent)

    def rebuild(self, rounds: Sequence[Entry]) -> None:
        rows = [row for entry in rounds for row in self._rows_of(entry)]
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        header = _csv_text(self._columns, [dict(zip(self._columns, self._columns, strict=True))])
        self._set_content((header if rows else "") + _csv_text(self._columns, rows), rounds)

    def add(self, entry: Entry) -> None:
        rows = self._rows_of(entry)
        if any(name not in self._columns for row in rows for name in row):
            raise OutOfStep
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
