"""The folder of a running experiment: its lock and its results.

A row is on disk before its job counts as done; an incomplete last line (after a power cut) is
dropped.  No result is deleted: rows of jobs that are no longer in the suite are moved to a second
file, and back when the suite contains them again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from lightyear_node.errors import AlreadyRunning, ConfigError, StoreError
from lightyear_node.lab.results_reader import RESULTS_NAME

ASIDE_NAME = "results-aside.jsonl"
LOCK_NAME = ".lock"
PARTS_NAME = "acceptance"

Row = dict[str, Any]


class ResultFolder:
    """One experiment's folder, locked while this context is open."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.results = directory / RESULTS_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = (directory / LOCK_NAME).open("a")
        except OSError as problem:
            raise ConfigError(
                f"{directory}: cannot be written: {problem.strerror}",
                hint="name another folder with --out",
            ) from None
        try:
            # The kernel releases the lock when the process ends.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise AlreadyRunning(
                f"another experiment is writing to {directory}",
                hint="wait for it, stop it, or name another folder with --out",
            ) from None
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()
        self._lock.close()

    def require_empty(self) -> None:
        """Raise if the folder has results already."""
        places = (self.results, self.directory / ASIDE_NAME, self.directory / PARTS_NAME)
        if any(place.exists() and place.stat().st_size for place in places):
            raise ConfigError(
                f"{self.directory} has results already",
                hint="add --resume to continue with them, or name another folder with --out",
            )

    def select(self, keys: Iterable[str]) -> tuple[dict[str, Row], dict[str, Row]]:
        """Return the newest row of each of these keys, and the others, which are moved aside."""
        wanted = set(keys)
        aside = self.directory / ASIDE_NAME
        # Rows of the results file take precedence.
        rows = {**_by_key(aside), **_by_key(self.results)}
        ours = {key: row for key, row in rows.items() if key in wanted}
        others = {key: row for key, row in rows.items() if key not in wanted}
        # At every moment each row is in at least one of the two files.
        if others:
            _replace(aside, rows.values())
        _replace(self.results, ours.values())
        if others:
            _replace(aside, others.values())
        else:
            aside.unlink(missing_ok=True)
        return ours, others

    def append(self, rows: Iterable[Row]) -> None:
        """Append rows; they are on disk when this returns."""
        text = "".join(_line(row) for row in rows)
        try:
            if self._file is None:
                self._file = self.results.open("a", encoding="utf-8")
            self._file.write(text)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as problem:
            raise StoreError(
                f"{self.results}: cannot be written: {problem.strerror}",
                hint="free disk space, then continue with --resume",
            ) from None

    def part(self, key: str) -> Path:
        """The file of one finished acceptance measurement."""
        return self.directory / PARTS_NAME / f"{key}.jsonl"

    def write_part(self, key: str, rows: Iterable[Row]) -> None:
        self.part(key).parent.mkdir(exist_ok=True)
        _replace(self.part(key), rows)

    def join_parts(self, keys: Iterable[str], name: str) -> None:
        """Join the finished measurements into one file, in this order."""
        rows = [row for key in keys for row in read_lines(self.part(key))]
        if rows:
            _replace(self.directory / name, rows)
        else:
            (self.directory / name).unlink(missing_ok=True)

    def read_json(self, name: str) -> Row:
        """Return a JSON object; empty if the file is missing or damaged."""
        try:
            plain = json.loads((self.directory / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return plain if isinstance(plain, dict) else {}

    def write_json(self, name: str, plain: Row) -> None:
        _replace_text(self.directory / name, json.dumps(plain, indent=2, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[Row]:
    """Return all rows; an incomplete last line (no line feed, no JSON) is dropped."""
    if not path.exists():
        return []
    *lines, rest = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate([*lines, rest], start=1):
        try:
            if line.strip():
                rows.append(json.loads(line))
        except ValueError:
            if number <= len(lines):
                raise ConfigError(
                    f"{path}:{number}: not a line of JSON",
                    hint="remove that line; --resume runs its job again",
                ) from None
    return rows


def _by_key(path: Path) -> dict[str, Row]:
    """Rows by key; the last row of a key counts."""
    rows = {}
    for number, row in enumerate(read_lines(path), start=1):
        if not isinstance(row, dict) or not isinstance(row.get("key"), str):
            raise ConfigError(
                f"{path}: result {number} is not that of a job", hint="remove that line"
            )
        rows[row["key"]] = row
    return rows


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _replace(path: Path, rows: Iterable[Row]) -> None:
    _replace_text(path, "".join(_line(row) for row in rows))


def _replace_text(path: Path, text: str) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(path.name + ".new")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as problem:
        raise StoreError(f"{path}: cannot be written: {problem.strerror}") from None
