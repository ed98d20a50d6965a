"""Reads back the records of a journal, and finds the first live one that breaks the chain."""

from __future__ import annotations

from lightyear_node.storage.hash_chain import MEMORY_DIGEST, Record, broken_links
from lightyear_node.storage.journal import Journal
from lightyear_node.storage.journal_reader import reading


def read_records(journal: Journal, kind: str | None = None) -> list[Record]:
    """All records, or those of one kind, with the bodies that were appended."""
    with reading(journal.path) as snapshot:
        rows = list(snapshot.rows(kind))
    found = []
    for row in rows:
        body = {key: value for key, value in row.plain_body().items() if key != MEMORY_DIGEST}
        numbers = (row.seq, row.wall_ns, row.lamport, row.round)
        found.append(Record(*numbers, row.kind, body, row.hash))
    return found


def first_bad_record(journal: Journal) -> int | None:
    with reading(journal.path, live_only=True) as snapshot:
        bad = broken_links(snapshot.rows(), snapshot.before, snapshot.first_seq)
        return next((row.seq for row in bad), None)
