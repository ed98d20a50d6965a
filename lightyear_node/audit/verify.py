"""Verifies a journal and finds its first invalid record.

tampering                                detected by
edit, removal, swap, insertion           the hash chain
rewriting, hashes included               the signature of the next completed round
truncation                               the note of the newest record, the high-water mark, a
                                         signature, or the durable state
altered durable state                    its hash in the last record
altered closed segment                   its SHA-256 in the durable state
replacement by an older copy             only the heads that peers hold: `claim`
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightyear_node.config.fields import NAME_PATTERN
from lightyear_node.protocol.signing import verify_head
from lightyear_node.storage.hash_chain import StoredRecord, covers_memory
from lightyear_node.types import Digest, PeerName, SignedHead

if TYPE_CHECKING:
    from lightyear_node.audit.export import RecordSource

RESTORE = (
    "stop the node, keep this state directory unchanged as evidence, and restore a backup or begin"
    " with an empty `state_dir`; inform the other sites"
)
_FIND_WRITER = "find out who could write to this file"


@dataclass(frozen=True, slots=True)
class FirstProblem:
    """The first invalid record, and what to do."""

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
    """Hash of the last valid record; it covers everything before it."""
    rounds: int
    """Number of completed rounds."""
    signed: int
    """Number of these whose signature was verified."""
    finding: FirstProblem | None = None
    absent: Sequence[str] = ()
    """Closed segments before the first record that were missing and not verified."""


def verify(source: RecordSource, keys: Sequence[bytes]) -> Audit:
    """Verify all records, up to the first invalid one.

    `keys` are the public keys of the site's certificates; without any, signatures are not verified,
    and `signed` is 0.
    """
    verifier = _Verifier(source, keys)
    for row in source.rows():
        finding = verifier.step(row)
        if finding is not None:
            return verifier.audit(finding)
    return verifier.audit(verifier.end())


class _Verifier:
    def __init__(self, source: RecordSource, keys: Sequence[bytes]) -> None:
        self._source = source
        self._keys = keys
        self._before = source.before
        self._expected = source.first_seq
        self._site, self._federation = source.site, source.federation
        self._heads = deque(sorted(source.heads.items()))
        """Signed heads of the records that have not been reached yet."""
        self._round: int | None = None
        self._rounds = self._signed = 0
        self._last: dict[str, StoredRecord] = {}
        self._newest: StoredRecord | None = None

    def audit(self, finding: FirstProblem | None) -> Audit:
        first, last = self._source.first_seq, self._expected - 1
        return Audit(
            self._site,
            self._federation,
            first,
            last,
            self._before,
            self._rounds,
            self._signed,
            finding,
            tuple(self._source.absent),
        )

    def step(self, row: StoredRecord) -> FirstProblem | None:
        """Check the next record; its hash first, before its content is used."""
        finding = self._check_hash(row) or self._check_orphaned_head(row.seq)
        if finding is not None:
            return finding
        self._round = row.round
        if row.kind == "start":
            finding = self._check_start(row)
        elif row.kind == "seal":
            self._site = self._site or sealed_by(row)
        signed = bool(self._heads) and self._heads[0][0] == row.seq
        head = self._heads.popleft()[1] if signed else None
        if row.kind == "commit":
            finding = self._check_commit(row, head)
        elif head is not None:
            finding = self._problem(
                row.seq, "is signed, but does not complete a round", _FIND_WRITER
            )
        if finding is not None:
            return finding
        self._last[row.kind] = self._newest = row
        self._before, self._expected = row.hash, row.seq + 1
        return None

    def _check_hash(self, row: StoredRecord) -> FirstProblem | None:
        seq = self._expected
        if row.seq != seq:
            if type(row.seq) is int and row.seq > seq:
                missing = f"is missing: the next one here is number {row.seq}"
                return self._problem(seq, missing, RESTORE)
            return self._problem(seq, f"is missing: number {row.seq!r} is in its place", RESTORE)
        if row.hash_after(self._before) != row.hash:
            self._round = row.round if type(row.round) is int else self._round
            return self._problem(seq, "is not what was written: its hash does not match", RESTORE)
        return None

    def _check_orphaned_head(self, seq: int) -> FirstProblem | None:
        """Heads are sorted: one with an earlier number has no record."""
        first = self._heads[0][0] if self._heads else seq
        if first >= seq:
            return None
        return self._problem(first, "is signed, but there is no such record", _FIND_WRITER)

    def _check_start(self, row: StoredRecord) -> FirstProblem | None:
        body = row.plain_body()
        if "signing_key" not in body:
            return None  # written by a version without signatures
        self._site, self._federation = name(body.get("site")), name(body.get("federation"))
        if self._keys and body["signing_key"] not in [key.hex() for key in self._keys]:
            return self._problem(
                row.seq,
                "names another signing key than the site's certificate",
                "if this site has made new keys since, add --certificate with its old one;"
                " if not, this journal was not written by this site",
            )
        return None

    def _check_commit(self, row: StoredRecord, head: tuple[Any, Any] | None) -> FirstProblem | None:
        self._rounds += 1
        if head is None:
            if self._federation is None:
                return None
            return self._problem(
                row.seq, "completes a round, but its signature is missing", RESTORE
            )
        hash, signature = head
        if hash != row.hash:
            return self._problem(row.seq, "has another hash than the one that was signed", RESTORE)
        if not self._keys:
            return None
        if not self._is_signed(row, signature):
            return self._problem(row.seq, "has a signature that is not this site's", RESTORE)
        self._signed += 1
        return None

    def _is_signed(self, row: StoredRecord, signature: Any) -> bool:
        try:
            head = SignedHead(row.seq, Digest(row.hash), bytes.fromhex(signature))
        except (TypeError, ValueError):
            return False
        if signature != head.signature.hex() or self._site is None or self._federation is None:
            return False  # not in canonical form
        site = PeerName(self._site)
        return any(verify_head(head, self._federation, site, key) for key in self._keys)

    def end(self) -> FirstProblem | None:
        """Check what follows the last record: truncation, durable state, closed segments."""
        return self._check_truncated() or self._check_memory() or self._check_segments()

    def _check_segments(self) -> FirstProblem | None:
        for file in self._source.altered:
            about = f"is valid, but the closed segment {file} was changed after it was closed"
            return self._problem(self._expected - 1, about, RESTORE)
        return None

    def _check_truncated(self) -> FirstProblem | None:
        source, last = self._source, self._expected - 1
        beyond = self._heads[0][0] if self._heads else None
        if beyond is not None:
            about = f"is missing: number {beyond} was signed, but the journal ends at {last}"
            return self._problem(self._expected, about, RESTORE)
        if source.memory is None:
            return None
        if source.mark is not None and source.mark.seq > last:
            about = f"is missing: {source.mark.seq} records were committed, but it ends at {last}"
            return self._problem(self._expected, about, RESTORE)
        if source.newest is None:
            if self._federation is None:
                return None
            about = "is the last one here, but the note of the newest record is missing"
            return self._problem(last, about, RESTORE)
        seq, hash = source.newest
        if type(seq) is int and seq > last:
            about = f"is missing: {seq} records were written, but it ends at {last}"
            return self._problem(self._expected, about, RESTORE)
        if (seq, hash) != (last, self._before):
            about = "is the last one here, but not the one noted as the newest"
            return self._problem(last, about, RESTORE)
        return None

    def _check_memory(self) -> FirstProblem | None:
        """Compare the durable state with the last records."""
        if self._source.memory is None or self._newest is None:
            return None
        try:
            memory = {key: json.loads(value) for key, value in self._source.memory.items()}
        except (TypeError, ValueError):
            return self._problem(
                self._expected - 1, "is followed by a durable state that is not JSON", RESTORE
            )
        covered = covers_memory(self._newest, self._source.memory)
        if covered:
            return None
        wrong = _contradictions(memory, self._last)
        if wrong is None and covered is None:
            return None
        if wrong is None:
            about = "has the hash of another durable state than the stored one"
            return self._problem(self._newest.seq, about, RESTORE)
        row, what = wrong
        self._round = row.round
        about = f"contradicts the stored durable state: {what}"
        return self._problem(row.seq, about, RESTORE)

    def _problem(self, seq: int, about: str, advice: str) -> FirstProblem:
        return FirstProblem(seq, self._round, f"record {seq} {about}", advice)


def name(value: Any) -> str | None:
    """Return a valid name of a site or federation, else None: other values must not be printed."""
    return value if isinstance(value, str) and re.fullmatch(NAME_PATTERN, value) else None


def sealed_by(row: StoredRecord) -> str | None:
    update = row.plain_body().get("update")
    return name(update.get("peer")) if isinstance(update, Mapping) else None


def _contradictions(
    memory: Mapping[str, Any], last: Mapping[str, StoredRecord]
) -> tuple[StoredRecord, str] | None:
    commit, seal = last.get("commit"), last.get("seal")
    if commit is not None:
        # A fallback after damaged models, or a new generation, may have changed it since.
        model = _newest(commit, last.get("fallback"))
        if (memory.get("models") or [None])[0] != model.plain_body().get("model"):
            return model, "the model of the last round"
        reached = (memory.get("barrier") or {}).get("round", 0)
        if _newest(commit, last.get("generation")) is commit and reached <= commit.round:
            return commit, "the current round"
    if seal is not None:
        announced = ((memory.get("manifest") or {}).get("manifest") or {}).get("update")
        if announced != seal.plain_body().get("update"):
            return seal, "the last announced update"
    return None


def _newest(one: StoredRecord, other: StoredRecord | None) -> StoredRecord:
    return other if other is not None and other.seq > one.seq else one


def head_contradiction(
    holder: str, head: SignedHead, *, length: int, found: str | None
) -> str | None:
    """Return how a journal contradicts a head that `holder` has, signed by the journal's site.

    `length` is the number of records in the journal, and `found` its hash at the head's number.
    Returns None if they agree.
    """
    if head.seq > length:
        return (
            f"{holder} holds a signed head of record {head.seq}, but this journal ends at record"
            f" {length}: it was cut short, or restored from an older copy"
        )
    if found != head.hash:
        return (
            f"{holder} holds a signed head of record {head.seq} that is not the one in this"
            " journal: it was rewritten, at that record or before it"
        )
    return None
