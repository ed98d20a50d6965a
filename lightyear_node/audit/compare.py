"""Compares two sites' journals of the same rounds and finds the first difference.

    A's record of B's update for a round    equals the update that B sealed, and vice versa
    both records of a third site's update   are equal
    a head of B's journal that A held       is still in B's journal, and vice versa

What lies outside one of the journals is not compared, only counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightyear_node.audit.export import RecordSource
from lightyear_node.audit.verify import Audit, name, verify
from lightyear_node.errors import ConfigError
from lightyear_node.types import Update

Key = tuple[str, int, int]
"""Site, generation and round, which identify one update with exactly one digest."""
DEPTH_MAX = 8
"""Maximum nesting of an update in a record's body; ours have depth 2."""
_OBSERVED = ("decision", "witness")
"""Kinds of records in which a site names updates of other sites."""


@dataclass(slots=True)
class RecordedUpdates:
    """The updates of all sites that one journal names."""

    site: str
    federation: str | None
    sealed: dict[tuple[int, int], str] = field(default_factory=dict)
    observed: dict[Key, tuple[str, int]] = field(default_factory=dict)
    """The digest, and the number of the record that names it."""
    refused: dict[str, set[str]] = field(default_factory=dict)
    """Digests of updates that were not accepted; their rounds are not recorded."""
    heads: dict[str, list[tuple[int, str, int]]] = field(default_factory=dict)
    """For each peer: number and hash of its heads, and the rounds in which they were held."""
    rounds: set[int] = field(default_factory=set)
    last_seq: int = 0
    first_seq: int = 1

    def covers(self, generation: int, round: int) -> bool:
        """Whether this journal includes the update that its site sealed for that round."""
        rounds = [round for other, round in self.sealed if other == generation]
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
    """Rounds that both sites have completed."""
    updates: int = 0
    """Number of compared updates."""
    heads: int = 0
    uncovered: int = 0
    """Not compared, because they lie outside one of the journals."""
    differences: list[Difference] = field(default_factory=list)

    @property
    def first(self) -> Difference | None:
        return min(self.differences, key=lambda one: one.round, default=None)


def recorded_updates(source: RecordSource, audit: Audit) -> RecordedUpdates:
    updates = RecordedUpdates(
        str(audit.site), audit.federation, first_seq=audit.first_seq, last_seq=audit.last_seq
    )
    for row in source.rows():
        _take(updates, row.kind, row.seq, row.round, row.plain_body())
    return updates


def _take(
    updates: RecordedUpdates, kind: str, seq: int, round: int, body: Mapping[str, Any]
) -> None:
    """Add one record; values of unexpected form, perhaps written by others, are ignored."""
    if kind == "seal":
        for update in _updates(body):
            updates.sealed[update.age] = update.digest
    elif kind == "commit":
        updates.rounds.add(round)
        for peer, head_seq, hash in _heads(body):
            held = updates.heads.setdefault(peer, [])
            if not held or held[-1][0] != head_seq:
                held.append((head_seq, hash, round))
    elif kind in _OBSERVED:
        for update in _updates(body):
            key = (update.peer, update.generation, update.round)
            updates.observed.setdefault(key, (update.digest, seq))
        for peer, digest in _refusals(body):
            updates.refused.setdefault(peer, set()).add(digest)


def _updates(value: Any, depth: int = 0) -> Iterator[Update]:
    """Find all complete names of updates in a record's body, at any depth."""
    if depth > DEPTH_MAX:
        return
    if isinstance(value, Mapping):
        numbers = value.get("generation"), value.get("round")
        if _is_name(value.get("peer")) and _is_digest(value.get("digest")):
            if all(type(number) is int for number in numbers):
                yield Update(value["peer"], *numbers, value["digest"])  # type: ignore[arg-type]
            return
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _updates(item, depth + 1)


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


def _is_name(value: Any) -> bool:
    return name(value) is not None


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def compare(left: RecordSource, right: RecordSource, labels: tuple[str, str]) -> Comparison:
    """Compare two journals; `labels` name them in texts.  An invalid journal is a difference."""
    audits = [_verified(left, labels[0]), _verified(right, labels[1])]
    for audit, label in zip(audits, labels, strict=True):
        problem = audit.finding
        if problem is not None:
            difference = Difference(
                problem.round or 0,
                f"{label} does not hold in itself: {problem.about}",
                problem.advice,
            )
            sites = (audits[0].site or labels[0], audits[1].site or labels[1])
            return Comparison(sites, differences=[difference])
    a, b = recorded_updates(left, audits[0]), recorded_updates(right, audits[1])
    if a.site == b.site:
        raise ConfigError(
            f"both are records of {a.site}", hint="name journals of two different sites"
        )
    if a.federation and b.federation and a.federation != b.federation:
        raise ConfigError(
            f"{a.site} has recorded the federation {a.federation}, {b.site} {b.federation}",
            hint="name two journals of one federation",
        )
    result = Comparison((a.site, b.site), rounds=len(a.rounds & b.rounds))
    for one, other, source in ((a, b, right), (b, a, left)):
        _compare_sealed(result, one, other)
        _compare_refused(result, one, other)
        _compare_heads(result, one, other, source)
    _compare_third_parties(result, a, b)
    return result


def _verified(source: RecordSource, label: str) -> Audit:
    audit = verify(source, [])
    if audit.site is None and audit.finding is None:
        raise ConfigError(
            f"{label} does not name its site",
            hint="it has no announced update: compare after the first completed round",
        )
    return audit


def _compare_sealed(result: Comparison, one: RecordedUpdates, other: RecordedUpdates) -> None:
    """Compare the updates of `other` that `one` received with those that `other` sealed."""
    for (peer, generation, round), (digest, seq) in one.observed.items():
        if peer != other.site:
            continue
        sealed = other.sealed.get((generation, round))
        if sealed is None and not other.covers(generation, round):
            result.uncovered += 1
            continue
        result.updates += 1
        if sealed == digest:
            continue
        theirs = f"has recorded {sealed[:12]}" if sealed else "has recorded none"
        result.differences.append(
            Difference(
                round,
                f"for round {round} {one.site} had the update {digest[:12]} of {peer}"
                f" (record {seq}), but {peer} {theirs}",
                f"the update that {one.site} had was signed: {peer} has sent different updates to"
                " different sites, or has rewritten its journal",
            )
        )


def _compare_refused(result: Comparison, one: RecordedUpdates, other: RecordedUpdates) -> None:
    """Compare refused updates, of which only the digest is known: a missing one proves nothing."""
    known = {digest for (peer, *_), (digest, _) in one.observed.items() if peer == other.site}
    sealed = set(other.sealed.values())
    for digest in one.refused.get(other.site, set()) - known:
        if digest in sealed:
            result.updates += 1
        else:
            result.uncovered += 1


def _compare_third_parties(result: Comparison, a: RecordedUpdates, b: RecordedUpdates) -> None:
    for key in a.observed.keys() & b.observed.keys():
        peer, _, round = key
        (ours, our_seq), (theirs, their_seq) = a.observed[key], b.observed[key]
        result.updates += 1
        if ours != theirs:
            result.differences.append(
                Difference(
                    round,
                    f"for round {round} {a.site} had the update {ours[:12]} of {peer}"
                    f" (record {our_seq}), but {b.site} had {theirs[:12]} (record {their_seq})",
                    f"{peer} has sent two different updates for one round: ask {peer}, and keep"
                    " both journals as evidence",
                )
            )
    for site, refused in a.refused.items():
        result.updates += len(refused & b.refused.get(site, set()))


def _compare_heads(
    result: Comparison, one: RecordedUpdates, other: RecordedUpdates, source: RecordSource
) -> None:
    """Compare the heads of `other` that `one` held with the present journal of `other`."""
    for seq, hash, round in one.heads.get(other.site, []):
        if not other.first_seq <= seq <= other.last_seq:
            result.uncovered += 1
            continue
        result.heads += 1
        if source.hash_of(seq) != hash:
            result.differences.append(
                Difference(
                    round,
                    f"in round {round} {one.site} held a signed head of record {seq} of"
                    f" {other.site} that is not in the journal {other.site} shows now",
                    f"{other.site} has rewritten its journal, at record {seq} or before it",
                )
            )
