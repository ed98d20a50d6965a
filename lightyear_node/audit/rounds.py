"""The rounds of a journal: how each was closed, and the verdict on every peer's update."""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from lightyear_node.audit.reasons import guard_lines, reason_text
from lightyear_node.errors import ConfigError
from lightyear_node.storage.hash_chain import MEMORY_DIGEST, StoredRecord
from lightyear_node.types import fate

Plain = Mapping[str, Any]
_CAUSES = {
    "all": "all expected updates had arrived",
    "grace": "enough updates had arrived, and the grace period for the others had ended",
    "overtaken": "enough other sites had moved on to a later round",
}


@dataclass(slots=True)
class RoundEntry:
    """The records of one round; parts that have not happened yet are empty."""

    round: int
    sealed: Plain = field(default_factory=dict)
    decided: Plain = field(default_factory=dict)
    committed: Plain = field(default_factory=dict)
    wall_ns: int = 0
    """Time of the newest of these records."""
    seqs: dict[str, int] = field(default_factory=dict)
    others: list[dict[str, Any]] = field(default_factory=list)
    """Further records of this round, such as operator commands and messages of peers."""

    @property
    def time(self) -> str:
        return timestamp(self.wall_ns)

    @property
    def verdicts(self) -> Sequence[Plain]:
        verdicts: Sequence[Plain] = self.decided.get("verdicts", [])
        return verdicts

    def summary(self) -> dict[str, Any]:
        counts = Counter(fate_of(verdict) for verdict in self.verdicts)
        return {
            "round": self.round,
            "time": self.time,
            "state": self.state,
            "cause": self.decided.get("cause"),
            "accepted": counts["accepted"],
            "rejected": counts["rejected"],
            "missing": counts["missing"],
            "before": self.sealed.get("metrics", {}),
            "after": self.committed.get("metrics", {}),
            "model": self.committed.get("model"),
        }

    @property
    def state(self) -> str:
        if self.committed:
            return "completed"
        return "decided" if self.decided else "collecting" if self.sealed else "begun"

    def to_plain(self) -> dict[str, Any]:
        return {
            **self.summary(),
            "why": self.decided.get("why"),
            "update": self.sealed.get("update"),
            "samples": self.sealed.get("samples"),
            "verdicts": [verdict_of(self, verdict) for verdict in self.verdicts],
            "harm": self.committed.get("harm"),
            "worth": self.committed.get("worth"),
            "heads": self.committed.get("heads", {}),
            "records": self.seqs,
            "others": self.others,
        }


def rounds_of(rows: Iterable[StoredRecord]) -> dict[int, RoundEntry]:
    """Group records by round; of a round that was repeated after a lost disk, the last attempt."""
    found: dict[int, RoundEntry] = {}
    for row in rows:
        if type(row.round) is not int or row.kind == "start":
            continue
        entry = found.setdefault(row.round, RoundEntry(row.round))
        body = {key: value for key, value in row.plain_body().items() if key != MEMORY_DIGEST}
        match row.kind:
            case "seal":
                entry.sealed = body
            case "decision":
                entry.decided = body
            case "commit":
                entry.committed = body
            case _:
                entry.others.append({"seq": row.seq, "kind": row.kind, "body": body})
                continue
        entry.seqs[row.kind] = row.seq
        entry.wall_ns = row.wall_ns
    return {round: entry for round, entry in found.items() if entry.seqs}


def find_round(rounds: Mapping[int, RoundEntry], number: int) -> RoundEntry:
    if number in rounds:
        return rounds[number]
    if not rounds:
        raise ConfigError("no round is recorded yet", hint="the first one is still being trained")
    first, last = min(rounds), max(rounds)
    hint = f"this site has recorded rounds {first} to {last}"
    if first < number < last:
        hint += "; it skipped this one because the others were ahead"
    raise ConfigError(f"there is no round {number}", hint=hint)


def verdict_of(entry: RoundEntry, verdict: Plain) -> dict[str, Any]:
    accepted: Iterable[Plain] = entry.decided.get("accepted", [])
    used = next((one for one in accepted if one.get("peer") == verdict.get("peer")), {})
    reason = str(verdict.get("reason"))
    recorded = entry.decided.get("details") or {}
    details = verdict.get("details") or recorded.get(verdict.get("peer")) or {}
    text = reason_text(reason, details)
    return {
        "peer": verdict.get("peer"),
        "fate": fate_of(verdict),
        "accepted": bool(verdict.get("accepted")),
        "reason": reason,
        "about": text.about,
        "advice": text.advice,
        "score": verdict.get("score"),
        "threshold": (verdict.get("checks") or {}).get("tau"),
        "weight": verdict.get("weight", 0.0),
        "digest": verdict.get("digest"),
        "generation": used.get("generation", verdict.get("generation")),
        "update_round": used.get("round", verdict.get("round")),
        "guard": [asdict(line) for line in guard_lines(verdict.get("checks") or {})],
        "details": details,
    }


def explain_verdict(entry: RoundEntry, peer: str) -> dict[str, Any]:
    """Return the verdict on one peer's update in one round, with its explanation."""
    if not entry.decided:
        raise ConfigError(
            f"round {entry.round} is not decided yet",
            hint="`lightyear-node status` shows what it waits for",
        )
    names = [str(verdict.get("peer")) for verdict in entry.verdicts]
    if peer not in names:
        near = difflib.get_close_matches(peer, names, n=1, cutoff=0.5)
        known = f"did you mean {near[0]}?" if near else f"it had: {', '.join(names) or 'none'}"
        raise ConfigError(f"round {entry.round} had no peer `{peer}`", hint=known)
    verdict = verdict_of(entry, entry.verdicts[names.index(peer)])
    cause = str(entry.decided.get("cause"))
    return {
        "round": entry.round,
        "time": entry.time,
        **verdict,
        "cause": cause,
        "cause_about": _CAUSES.get(cause, cause),
        "why": entry.decided.get("why"),
        "merge": merge_text(entry, peer),
        "harm": entry.committed.get("harm"),
        "model": entry.committed.get("model"),
        "before": entry.sealed.get("metrics", {}),
        "after": entry.committed.get("metrics", {}),
        "records": entry.seqs,
    }


def merge_text(entry: RoundEntry, peer: str | None = None) -> list[str]:
    """Describe the merge in sentences, with one about `peer` if it was left out."""
    if not entry.committed:
        return ["the merge is not complete yet"]
    accepted = [str(one.get("peer")) for one in entry.decided.get("accepted", [])]
    harm = entry.committed.get("harm") or {}
    dropped = list(harm.get("dropped") or [])
    lost = [str(name) for name in entry.committed.get("left_out") or []]
    merged = [name for name in accepted if name not in {*dropped, *lost}]
    if harm.get("kept_local"):
        lines = ["our own model was kept: every merged model did worse on our data"]
    elif merged:
        lines = [f"merged into our model: {', '.join(merged)}"]
    else:
        lines = ["no update was merged: our own model was kept"]
    if dropped:
        lines.append(f"dropped again, because the merged model did worse: {', '.join(dropped)}")
    if lost:
        lines.append(f"left out, because their files could not be read: {', '.join(lost)}")
    if harm:
        losses = [_attempt(one) for one in harm.get("tried") or []]
        lines.append(
            f"loss on our data: {_number(harm.get('loss_before'))} before merging, limit"
            f" {_number(harm.get('limit'))}; measured {', '.join(losses) or 'nothing'}"
        )
    if peer in {*dropped, *lost}:
        lines.append(f"so {peer} was accepted on its own, but is not part of the result")
    return lines


def fate_of(verdict: Plain) -> str:
    return fate(bool(verdict.get("accepted")), str(verdict.get("reason")))


def _attempt(tried: Plain) -> str:
    without = ", ".join(tried.get("without") or [])
    text = f"{_number(tried.get('loss'))} " + (f"without {without}" if without else "with all")
    gain, error = tried.get("gain"), tried.get("error")
    if not (isinstance(gain, int | float) and isinstance(error, int | float)):
        return text
    return f"{text} (decisions {100 * gain:+.3g} ± {100 * error:.2g} points)"


def timestamp(wall_ns: Any) -> str:
    """Format as UTC to the second; a value out of range is returned as a number."""
    try:
        return f"{datetime.fromtimestamp(wall_ns / 1e9, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (OverflowError, ValueError, OSError, TypeError):
        return str(wall_ns)


def _number(value: Any) -> str:
    """Format a number; the journal stores the largest float for values that are not finite."""
    if not isinstance(value, int | float):
        return "?"
    return "no number" if value == sys.float_info.max else f"{value:.4g}"
