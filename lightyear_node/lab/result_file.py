"""The folder of an experiment while it is being filled: its lock and its file of results.

A line is durable before anybody is told that its job is done; a line that a power cut has torn is
dropped.  Results are never thrown away: lines of jobs that are no longer in the suite are put aside
into a file of their own, and come back when the suite asks for them again.
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
from lightyear_node.lab.rows import RESULTS_NAME

ASIDE_NAME = "results-aside.jsonl"
LOCK_NAME = ".lock"
PARTS_NAME = "acceptance"

Row = dict[str, Any]


class Folder:
    """One experiment's folder; nobody else may write it while this context is open."""

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
            # The kernel drops the lock with the process, however that ends.
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

    def refuse_results(self) -> None:
        """For a run that is meant to be the first."""
        places = (self.results, self.directory / ASIDE_NAME, self.directory / PARTS_NAME)
        if any(place.exists() and place.stat().st_size for place in places):
            raise ConfigError(
                f"{self.directory} has results already",
                hint="add --resume to go on with them, or name another folder with --out",
            )

    def settle(self, keys: Iterable[str]) -> tuple[dict[str, Row], dict[str, Row]]:
        """The newest line of each of these keys, and of all others, which are put aside."""
        wanted = set(keys)
        aside = self.directory / ASIDE_NAME
        # In this order the file of results has the last word.
        rows = {**_by_key(aside), **_by_key(self.results)}
        ours = {key: row for key, row in rows.items() if key in wanted}
        others = {key: row for key, row in rows.items() if key not in wanted}
        # Whatever interrupts this, every line is in at least one of the two files.
        if others:
            _replace(aside, rows.values())
        _replace(self.results, ours.values())
        if others:
            _replace(aside, others.values())
        else:
            aside.unlink(missing_ok=True)
        return ours, others

    def append(self, rows: Iterable[Row]) -> None:
        """On the disk when this returns."""
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
                hint="make room on the disk, then go on with --resume",
            ) from None

    def part(self, key: str) -> Path:
        """Where the rows of one acceptance measurement lie, once it is finished."""
        return self.directory / PARTS_NAME / f"{key}.jsonl"

    def write_part(self, key: str, rows: Iterable[Row]) -> None:
        self.part(key).parent.mkdir(exist_ok=True)
        _replace(self.part(key), rows)

    def join_parts(self, keys: Iterable[str], name: str) -> None:
        """One file of all finished measurements, in this order."""
        rows = [row for key in keys for row in read_lines(self.part(key))]
        if rows:
            _replace(self.directory / name, rows)
        else:
            (self.directory / name).unlink(missing_ok=True)

    def read_json(self, name: str) -> Row:
        """Empty if it is not there or damaged."""
        try:
            plain = json.loads((self.directory / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return plain if isinstance(plain, dict) else {}

    def write_json(self, name: str, plain: Row) -> None:
        _replace_text(self.directory / name, json.dumps(plain, indent=2, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[Row]:
    """All lines but one that ends without a line feed and is no JSON: that one was torn."""
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
    """The later line of a key wins."""
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
    """The old or the new content, never half of it."""
    scratch = path.with_name(path.name + ".new")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as problem:
        raise StoreError(f"{path}: cannot be written: {problem.strerror}") from None
