"""Does a record still say what was written?  If not: the first place where it does not.

edited, dropped, swapped, inserted     the chain of hashes breaks there
written anew, hashes included          the signature of the next completed round does not fit
cut off at the end                     the note of the newest record, a signature or the memory
                                       tells of records that are not there
replaced as a whole by an older copy   only peers can tell, by the head they hold: `claim`
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightyear_node.config.fields import NAME_PATTERN
from lightyear_node.journal import Row
from lightyear_node.records import Digest, PeerName, SignedHead
from lightyear_node.signing import verify_head

RESTORE = (
    "stop the node, keep this state directory as it is for whoever looks into it, and restore a"
    " backup or begin with an empty `state_dir`; tell the other sites"
)
_ASK = "find out who could write to this file"


class Source(Protocol):
    """A journal, or an export of one, as it stands."""

    @property
    def before(self) -> str:
        """The hash in front of the first record."""

    @property
    def first_seq(self) -> int: ...

    @property
    def site(self) -> str | None:
        """Whose record it is, where that is said elsewhere than in its records."""

    @property
    def federation(self) -> str | None: ...

    @property
    def heads(self) -> Mapping[int, tuple[Any, Any]]: ...

    @property
    def newest(self) -> tuple[Any, Any] | None: ...

    @property
    def memory(self) -> Mapping[str, str] | None:
        """None for an export, which has neither this nor `newest`."""

    def rows(self) -> Iterator[Row]: ...

    def hash_of(self, seq: int) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Finding:
    """The first record that does not hold, and what to do."""

    seq: int
    round: int | None
    about: str
    advice: str


@dataclass(frozen=True, slots=True)
class Audit:
    site: str | None
    federation: str | None
    first_seq: int
    last_seq: int
    hash: str
    """Of the last record that holds; it stands for everything before it."""
    rounds: int
    """How many were completed."""
    signed: int
    """How many of these bear a signature that was verified."""
    finding: Finding | None = None


def verify(source: Source, keys: Sequence[bytes]) -> Audit:
    """Follow the record to its end, or to the first that does not hold.

    `keys` are the site's own, as its certificates name them; without any, signatures are not looked
    at, and `signed` is 0.
    """
    walk = _Walk(source, keys)
    for row in source.rows():
        finding = walk.step(row)
        if finding is not None:
            return walk.audit(finding)
    return walk.audit(walk.end())


class _Walk:
    def __init__(self, source: Source, keys: Sequence[bytes]) -> None:
        self._source = source
        self._keys = keys
        self._before = source.before
        self._expected = source.first_seq
        self._site, self._federation = source.site, source.federation
        self._heads = dict(sorted(source.heads.items()))
        self._round: int | None = None
        self._rounds = self._signed = 0
        self._last: dict[str, Row] = {}

    def audit(self, finding: Finding | None) -> Audit:
        first, last = self._source.first_seq, self._expected - 1
        told = (self._rounds, self._signed)
        return Audit(self._site, self._federation, first, last, self._before, *told, finding)

    def step(self, row: Row) -> Finding | None:
        """One more record; nothing of it is believed before its hash is."""
        finding = self._link(row) or self._astray(row.seq)
        if finding is not None:
            return finding
        self._round = row.round
        if row.kind == "start":
            finding = self._begin(row)
        elif row.kind == "seal":
            self._site = self._site or sealed_by(row)
        head = self._heads.pop(row.seq, None)
        if row.kind == "commit":
            finding = self._completed(row, head)
        elif head is not None:
            finding = self._bad(row.seq, "is signed, though it completes no round", _ASK)
        if finding is not None:
            return finding
        self._last[row.kind] = row
        self._before, self._expected = row.hash, row.seq + 1
        return None

    def _link(self, row: Row) -> Finding | None:
        seq = self._expected
        if row.seq != seq:
            if type(row.seq) is int and row.seq > seq:
                missing = f"is missing: the next one here is number {row.seq}"
                return self._bad(seq, missing, RESTORE)
            return self._bad(seq, f"is not here; in its place stands number {row.seq!r}", RESTORE)
        if row.hash_after(self._before) != row.hash:
            self._round = row.round if type(row.round) is int else self._round
            return self._bad(seq, "is not what was written: its hash does not fit", RESTORE)
        return None

    def _astray(self, seq: int) -> Finding | None:
        """Signatures are in order: one of an earlier number belongs to nothing."""
        first = next(iter(self._heads), seq)
        if first >= seq:
            return None
        return self._bad(first, "is signed, but there is no such record", _ASK)

    def _begin(self, row: Row) -> Finding | None:
        body = row.plain_body()
        if "signing_key" not in body:
            return None  # of a version that did not sign
        self._site, self._federation = name(body.get("site")), name(body.get("federation"))
        if self._keys and body["signing_key"] not in [key.hex() for key in self._keys]:
            return self._bad(
                row.seq,
                "begins with another signing key than that of the site's certificate",
                "if this site has made new keys since, add --certificate with its old one;"
                " if not, somebody else has written this record",
            )
        return None

    def _completed(self, row: Row, head: tuple[Any, Any] | None) -> Finding | None:
        self._rounds += 1
        if head is None:
            if self._federation is None:
                return None
            return self._bad(row.seq, "completes a round, but its signature is missing", RESTORE)
        hash, signature = head
        if hash != row.hash:
            return self._bad(row.seq, "is signed with another hash than it has", RESTORE)
        if not self._keys:
            return None
        if not self._is_signed(row, signature):
            return self._bad(row.seq, "bears a signature that is not this site's", RESTORE)
        self._signed += 1
        return None

    def _is_signed(self, row: Row, signature: Any) -> bool:
        try:
            head = SignedHead(row.seq, Digest(row.hash), bytes.fromhex(signature))
        except (TypeError, ValueError):
            return False
        if signature != head.signature.hex() or self._site is None or self._federation is None:
            return False  # not as we would have written it
        site = PeerName(self._site)
        return any(verify_head(head, self._federation, site, key) for key in self._keys)

    def end(self) -> Finding | None:
        """After the last record: does anything tell of more?"""
        return self._cut_short() or self._memory()

    def _cut_short(self) -> Finding | None:
        source, last = self._source, self._expected - 1
        beyond = next(iter(self._heads), None)
        if beyond is not None:
            about = f"is missing: number {beyond} was signed, but the record ends at {last}"
            return self._bad(self._expected, about, RESTORE)
        if source.memory is None:
            return None
        if source.newest is None:
            if self._federation is None:
                return None
            about = "is the last one here, but the note of the newest record is missing"
            return self._bad(last, about, RESTORE)
        seq, hash = source.newest
        if type(seq) is int and seq > last:
            about = f"is missing: {seq} records were written, but it ends at {last}"
            return self._bad(self._expected, about, RESTORE)
        if (seq, hash) != (last, self._before):
            about = "is the last one here, but not the one noted as the newest"
            return self._bad(last, about, RESTORE)
        return None

    def _memory(self) -> Finding | None:
        """What the node would go on from is what its last records say."""
        if self._source.memory is None or not self._last:
            return None
        try:
            memory = {key: json.loads(value) for key, value in self._source.memory.items()}
        except (TypeError, ValueError):
            return self._bad(self._expected - 1, "is followed by a memory that is no JSON", RESTORE)
        wrong = _contradictions(memory, self._last)
        if wrong is None:
            return None
        row, what = wrong
        self._round = row.round
        about = f"says something else than the node's memory: {what}"
        return self._bad(row.seq, about, RESTORE)

    def _bad(self, seq: int, about: str, advice: str) -> Finding:
        return Finding(seq, self._round, f"record {seq} {about}", advice)


def name(said: Any) -> str | None:
    """A site's or federation's name; whatever else stands in its place is none, and not printed."""
    return said if isinstance(said, str) and re.fullmatch(NAME_PATTERN, said) else None


def sealed_by(row: Row) -> str | None:
    update = row.plain_body().get("update")
    return name(update.get("peer")) if isinstance(update, Mapping) else None


def _contradictions(memory: Mapping[str, Any], last: Mapping[str, Row]) -> tuple[Row, str] | None:
    commit, seal = last.get("commit"), last.get("seal")
    if commit is not None:
        if (memory.get("models") or [None])[0] != commit.plain_body().get("model"):
            return commit, "the model that the last round ended with"
        if (memory.get("barrier") or {}).get("round", 0) <= commit.round:
            return commit, "the round it has reached"
    if seal is not None:
        announced = ((memory.get("manifest") or {}).get("manifest") or {}).get("update")
        if announced != seal.plain_body().get("update"):
            return seal, "the update that was announced last"
    return None


def claim(holder: str, head: SignedHead, *, length: int, found: str | None) -> str | None:
    """What it means that `holder` has this head of a journal, signed by the journal's own site.

    `length` is the number of that journal's records, and `found` its hash at the head's number.
    """
    if head.seq > length:
        return (
            f"{holder} holds a signed head of record {head.seq}, but this journal ends at record"
            f" {length}: it was cut short, or restored from an older copy"
        )
    if found != head.hash:
        return (
            f"{holder} holds a signed head of record {head.seq} that is not the one in this"
            " journal: it was written anew, at that record or before it"
        )
    return None
