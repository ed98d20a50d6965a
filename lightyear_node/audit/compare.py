"""Two sites' records of the same rounds: do they agree, and if not, where do they first differ?

    what A recorded of B's update for a round     is what B says it sealed, and the other way round
    what both recorded of a third site's update   is the same
    what A held of B's journal at that time       is still in B's journal, and the other way round

Only what both can know is compared: whatever is outside of one of the records is counted as such,
and says nothing against anybody.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightyear_node.audit.verify import Audit, Source, name, verify
from lightyear_node.errors import ConfigError
from lightyear_node.records import Update

Key = tuple[str, int, int]
"""Site, generation and round: names one update, of which there must be one digest only."""
DEPTH_MAX = 8
"""How deep an update may stand in a body; ours stand at 2."""
_OBSERVED = ("decision", "witness")
"""Kinds of records in which a site says which updates of others it had."""


@dataclass(slots=True)
class Testimony:
    """What one record says of everybody's updates."""

    site: str
    federation: str | None
    sealed: dict[tuple[int, int], str] = field(default_factory=dict)
    observed: dict[Key, tuple[str, int]] = field(default_factory=dict)
    """The digest, and the record that says so."""
    refused: dict[str, set[str]] = field(default_factory=dict)
    """Digests of updates that were not accepted: their round is not in the record."""
    heads: dict[str, list[tuple[int, str, int]]] = field(default_factory=dict)
    """By peer: number and hash of its head, and the round in which it was held."""
    rounds: set[int] = field(default_factory=set)
    last_seq: int = 0
    first_seq: int = 1

    def covers(self, generation: int, round: int) -> bool:
        """Whether this record tells which update its site sealed for that round."""
        rounds = [sealed for of, sealed in self.sealed if of == generation]
        return bool(rounds) and min(rounds) <= round <= max(rounds)


@dataclass(frozen=True, slots=True)
class Difference:
    round: int
    about: str
    advice: str


@dataclass(slots=True)
class Comparison:
    sites: tuple[str, str]
    rounds: int = 0
    """Completed by both."""
    updates: int = 0
    """Compared and found to be the same, or not."""
    heads: int = 0
    uncovered: int = 0
    """Not compared, because one of the records does not reach there."""
    differences: list[Difference] = field(default_factory=list)

    @property
    def first(self) -> Difference | None:
        return min(self.differences, key=lambda one: one.round, default=None)


def testimony(source: Source, audit: Audit) -> Testimony:
    told = Testimony(
        str(audit.site), audit.federation, first_seq=audit.first_seq, last_seq=audit.last_seq
    )
    for row in source.rows():
        _take(told, row.kind, row.seq, row.round, row.plain_body())
    return told


def _take(told: Testimony, kind: str, seq: int, round: int, body: Mapping[str, Any]) -> None:
    """Somebody else has written it: what is not as we write it is not taken at all."""
    if kind == "seal":
        for update in _updates(body):
            told.sealed[update.age] = update.digest
    elif kind == "commit":
        told.rounds.add(round)
        for peer, head_seq, hash in _heads(body):
            held = told.heads.setdefault(peer, [])
            if not held or held[-1][0] != head_seq:
                held.append((head_seq, hash, round))
    elif kind in _OBSERVED:
        for update in _updates(body):
            key = (update.peer, update.generation, update.round)
            told.observed.setdefault(key, (update.digest, seq))
        for peer, digest in _refusals(body):
            told.refused.setdefault(peer, set()).add(digest)


def _updates(said: Any, depth: int = 0) -> Iterator[Update]:
    """Whatever names an update in full, however deep it stands in a record's body."""
    if depth > DEPTH_MAX:
        return
    if isinstance(said, Mapping):
        numbers = said.get("generation"), said.get("round")
        if _is_name(said.get("peer")) and _is_digest(said.get("digest")):
            if all(type(number) is int for number in numbers):
                yield Update(said["peer"], *numbers, said["digest"])  # type: ignore[arg-type]
            return
        said = list(said.values())
    if isinstance(said, list):
        for value in said:
            yield from _updates(value, depth + 1)


def _refusals(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    verdicts = body.get("verdicts")
    for verdict in verdicts if isinstance(verdicts, list) else []:
        if isinstance(verdict, Mapping) and not verdict.get("accepted"):
            peer, digest = verdict.get("peer"), verdict.get("digest")
            if _is_name(peer) and _is_digest(digest):
                yield str(peer), str(digest)


def _heads(body: Mapping[str, Any]) -> Iterator[tuple[str, int, str]]:
    heads = body.get("heads")
    for peer, head in heads.items() if isinstance(heads, Mapping) else ():
        if isinstance(head, Mapping) and _is_name(peer) and _is_digest(head.get("hash")):
            seq = head.get("seq")
            if type(seq) is int:
                yield peer, seq, head["hash"]


def _is_name(said: Any) -> bool:
    return name(said) is not None


def _is_digest(said: Any) -> bool:
    return isinstance(said, str) and re.fullmatch("[0-9a-f]{64}", said) is not None


def compare(left: Source, right: Source, called: tuple[str, str]) -> Comparison:
    """`called` is how the reader knows the two; a record that does not hold is a difference."""
    audits = [_sound(source, whose) for source, whose in ((left, called[0]), (right, called[1]))]
    for audit, whose in zip(audits, called, strict=True):
        bad = audit.finding
        if bad is not None:
            about = f"{whose} does not hold in itself: {bad.about}"
            sites = (audits[0].site or called[0], audits[1].site or called[1])
            return Comparison(sites, differences=[Difference(bad.round or 0, about, bad.advice)])
    a, b = testimony(left, audits[0]), testimony(right, audits[1])
    if a.site == b.site:
        raise ConfigError(f"both are records of {a.site}", hint="name those of two different sites")
    if a.federation and b.federation and a.federation != b.federation:
        raise ConfigError(
            f"{a.site} has recorded the federation {a.federation}, {b.site} {b.federation}",
            hint="name two records of one federation",
        )
    found = Comparison((a.site, b.site), rounds=len(a.rounds & b.rounds))
    for one, other, source in ((a, b, right), (b, a, left)):
        _own_words(found, one, other)
        _refused(found, one, other)
        _held(found, one, other, source)
    _third_parties(found, a, b)
    return found


def _sound(source: Source, called: str) -> Audit:
    audit = verify(source, [])
    if audit.site is None and audit.finding is None:
        raise ConfigError(
            f"{called} does not say whose record it is",
            hint="nothing has been announced in it: compare when there is a completed round",
        )
    return audit


def _own_words(found: Comparison, one: Testimony, other: Testimony) -> None:
    """What `one` had of `other` against what `other` says it has sealed."""
    for (peer, generation, round), (digest, seq) in one.observed.items():
        if peer != other.site:
            continue
        sealed = other.sealed.get((generation, round))
        if sealed is None and not other.covers(generation, round):
            found.uncovered += 1
            continue
        found.updates += 1
        if sealed == digest:
            continue
        theirs = f"says it sealed {sealed[:12]}" if sealed else "has recorded none"
        found.differences.append(
            Difference(
                round,
                f"for round {round} {one.site} had the update {digest[:12]} of {peer}"
                f" (record {seq}), but {peer} {theirs}",
                f"the update that {one.site} had was signed: {peer} has told different sites"
                " different things, or its record is not the one it wrote",
            )
        )


def _refused(found: Comparison, one: Testimony, other: Testimony) -> None:
    """Of refused updates only the digest is known: found there it agrees, else it says nothing."""
    known = {digest for (peer, *_), (digest, _) in one.observed.items() if peer == other.site}
    sealed = set(other.sealed.values())
    for digest in one.refused.get(other.site, set()) - known:
        if digest in sealed:
            found.updates += 1
        else:
            found.uncovered += 1


def _third_parties(found: Comparison, a: Testimony, b: Testimony) -> None:
    for key in a.observed.keys() & b.observed.keys():
        peer, _, round = key
        (ours, our_seq), (theirs, their_seq) = a.observed[key], b.observed[key]
        found.updates += 1
        if ours != theirs:
            found.differences.append(
                Difference(
                    round,
                    f"for round {round} {a.site} had the update {ours[:12]} of {peer}"
                    f" (record {our_seq}), but {b.site} had {theirs[:12]} (record {their_seq})",
                    f"{peer} has sent two different updates for one round: ask {peer}, and keep"
                    " both records as evidence",
                )
            )
    for site, refused in a.refused.items():
        found.updates += len(refused & b.refused.get(site, set()))


def _held(found: Comparison, one: Testimony, other: Testimony, source: Source) -> None:
    """Heads of `other` that `one` held, against the record that `other` shows now."""
    for seq, hash, round in one.heads.get(other.site, []):
        if not other.first_seq <= seq <= other.last_seq:
            found.uncovered += 1
            continue
        found.heads += 1
        if source.hash_of(seq) != hash:
            found.differences.append(
                Difference(
                    round,
                    f"in round {round} {one.site} held a signed head of record {seq} of"
                    f" {other.site} that is not in the record {other.site} shows now",
                    f"{other.site} has written its record anew, at record {seq} or before it",
                )
            )
