"""Seeded damage to the files of a journal, and a node's start on the result."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightyear_node.errors import LightyearError
from lightyear_node.node.construction import open_rounds, prepare
from lightyear_node.node.home import Home
from lightyear_node.node.worker_jobs import OpenedModel
from lightyear_node.storage.blobs import StoredBlob
from lightyear_node.storage.journal_reader import reading
from lightyear_node.types import Opened
from tests.support.journals import digest

PAGE = 4096
DB, LOG, INDEX, HIGH_WATER = "journal.db", "journal.db-wal", "journal.db-shm", "journal.mark"
_HEADER = b'{"w":{"data_offsets":[0,16],"dtype":"F32","shape":[4]}}         '
MODEL = OpenedModel(
    Opened("cpu", 4, 10, 10, "w", 0.1),
    StoredBlob(digest("start"), 80),
    header=len(_HEADER).to_bytes(8, "little") + _HEADER,
    wire_raw_bytes=8 + len(_HEADER) + 16,
    home_schema=digest("schema"),
)
"""What the worker would report for the model in the journal."""
Content = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    seed: int
    crashed: bool
    """Whether the newest records are only in the write-ahead log."""

    def __str__(self) -> str:
        return f"{'crashed' if self.crashed else 'closed'}-{self.seed}"


def damage(folder: Path, case: Case) -> str:
    """Damage one file; returns a description."""
    draw = random.Random(f"{case}")
    files = [DB, DB, DB, LOG, LOG, HIGH_WATER, INDEX] if case.crashed else [DB, DB, DB, HIGH_WATER]
    path = folder / draw.choice(files)
    kinds = [flip_bit, flip_bit, zero_page, truncate, swap_pages, garbage, garbage_tail, remove]
    if path.name in (DB, LOG):
        kinds += [flip_in_text] * 4
    kind = draw.choice(kinds)
    content = bytearray(path.read_bytes())
    kind(content, draw)
    if kind is remove:
        path.unlink()
    else:
        path.write_bytes(content)
    return f"{kind.__name__} in {path.name}"


def flip_bit(content: bytearray, draw: random.Random) -> None:
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)


def zero_page(content: bytearray, draw: random.Random) -> None:
    at = draw.randrange(0, len(content), PAGE)
    content[at : at + PAGE] = bytes(len(content[at : at + PAGE]))


def truncate(content: bytearray, draw: random.Random) -> None:
    del content[draw.randrange(len(content)) :]


def swap_pages(content: bytearray, draw: random.Random) -> None:
    pages = [content[at : at + PAGE] for at in range(0, len(content), PAGE)]
    one, other = draw.randrange(len(pages)), draw.randrange(len(pages))
    pages[one], pages[other] = pages[other], pages[one]
    content[:] = b"".join(pages)


def garbage(content: bytearray, draw: random.Random) -> None:
    at = draw.randrange(len(content))
    content[at : at + 64] = draw.randbytes(len(content[at : at + 64]))


def garbage_tail(content: bytearray, draw: random.Random) -> None:
    content += draw.randbytes(draw.randrange(1, 3 * PAGE))


def remove(content: bytearray, draw: random.Random) -> None:
    """The caller deletes the file."""


def flip_in_text(content: bytearray, draw: random.Random) -> None:
    """Flip a bit in the text of a record, a value or a signature."""
    words = [b'"round":', b'"models"', b'"barrier"', b'"verdicts"', b"site-b", b'"digest":"', b"0a"]
    places = [at for word in words for at in _all(content, word)]
    if places:
        at = draw.choice(places) + draw.randrange(12)
        content[min(at, len(content) - 1)] ^= 1 << draw.randrange(8)


def _all(content: bytearray, word: bytes) -> Iterator[int]:
    at = content.find(word)
    while at >= 0:
        yield at
        at = content.find(word, at + 1)


def content_of(path: Path) -> Content:
    """The content of a journal, in order."""
    with reading(path, thoroughly=True) as snapshot:
        rows = tuple(snapshot.rows())
        return rows, dict(snapshot.memory), dict(snapshot.heads), snapshot.newest


def started(home: Home, *, recovered: bool = False) -> Content:
    """Start a node, but do not contact peers; returns the content of its journal.

    Raises the error that would end the process of a real node.
    """

    async def start() -> None:
        parts = prepare(home, logging.getLogger("damage"), recovered=recovered)
        try:
            rounds = open_rounds(parts, MODEL, lambda work: work.close())
            await rounds.connections.close()
            rounds.tracking.close()
        finally:
            parts.state.close()

    asyncio.run(start())
    return content_of(home.directory / home.config.state_dir / DB)


def restored(files: Path, state: Path) -> None:
    """Restore the state directory to these files only."""
    shutil.rmtree(state, ignore_errors=True)
    shutil.copytree(files, state)


def outcome(start: Callable[[], Content]) -> Content | None:
    """The journal's content after the start; None if refused with one sentence and a hint."""
    try:
        return start()
    except LightyearError as refusal:
        problem = refusal
    assert problem.exit_code == 4, repr(problem)
    assert problem.hint, repr(problem)
    assert "\n" not in str(problem), repr(problem)
    return None
