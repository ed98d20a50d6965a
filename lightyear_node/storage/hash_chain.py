"""The hash chain of a journal: what each record's hash covers.  No I/O.

A record's hash covers the previous record's hash and its own content.  Every body contains, as
`memory`, the digest of the journal's memory after that record, so the chain covers what a restart
reads.  Records of earlier versions lack that entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Plain = Mapping[str, Any]
FIRST_HASH = "0" * 64
MEMORY_DIGEST = "memory"
"""Key of the memory's digest in a record's body."""


@dataclass(frozen=True, slots=True)
class Record:
    seq: int
    wall_ns: int
    lamport: int
    round: int
    kind: str
    body: Plain
    hash: str


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as read from a journal that may have been altered."""

    seq: Any
    wall_ns: Any
    lamport: Any
    round: Any
    kind: Any
    body: Any
    """JSON text."""
    hash: Any

    def hash_after(self, before: str) -> str | None:
        """The correct hash of this record; None if its values have the wrong types."""
        numbers = (self.seq, self.wall_ns, self.lamport, self.round)
        texts = (self.kind, self.body)
        if not all(type(one) is int for one in numbers):
            return None
        if not all(isinstance(one, str) for one in texts):
            return None
        front = canonical([*numbers, self.kind])[:-1]
        return _hash(before, f"{front},{self.body}]")

    def plain_body(self) -> Plain:
        """The parsed body; empty if it cannot be parsed."""
        try:
            found = json.loads(self.body)
        except (TypeError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def next_record(
    seq: int, wall_ns: int, lamport: int, round: int, kind: str, body: Plain, before: str
) -> Record:
    content = canonical([seq, wall_ns, lamport, round, kind, body])
    return Record(seq, wall_ns, lamport, round, kind, body, _hash(before, content))


def broken_links(
    rows: Iterable[StoredRecord], before: str = FIRST_HASH, expected_seq: int = 1
) -> Iterator[StoredRecord]:
    """The rows whose number or hash does not follow from the previous row."""
    for row in rows:
        if row.seq != expected_seq or row.hash != row.hash_after(before):
            yield row
        before, expected_seq = row.hash, row.seq + 1


class MemoryDigest:
    """The digest of a memory, updated when single values change."""

    def __init__(self, texts: Mapping[str, Any] | None = None) -> None:
        self._values = {key: _value_digest(text) for key, text in (texts or {}).items()}

    def changed(self, texts: Mapping[str, str]) -> MemoryDigest:
        """The digest with these values in place of the present ones."""
        after = MemoryDigest(texts)
        after._values = {**self._values, **after._values}
        return after

    def hex(self) -> str:
        return hashlib.sha256(canonical(self._values).encode()).hexdigest()


def covers_memory(newest: StoredRecord, texts: Mapping[str, Any]) -> bool | None:
    """Whether the memory matches the digest in the newest record; None if it has none."""
    named = newest.plain_body().get(MEMORY_DIGEST)
    return None if named is None else named == MemoryDigest(texts).hex()


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _value_digest(text: Any) -> str:
    # Any other type was not written by us and must match no digest.
    content = text if isinstance(text, str) else f"\0{text!r}"
    return hashlib.sha256(content.encode(errors="surrogatepass")).hexdigest()


def _hash(before: str, content: str) -> str:
    # Altered text may not be valid UTF-8; it then matches no hash.
    return hashlib.sha256(f"{before}{content}".encode(errors="surrogatepass")).hexdigest()
