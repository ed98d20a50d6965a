"""The rounds of a record: how each was closed, what became of every peer's update, and why."""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from lightyear_node.audit.reasons import guard_lines, words
from lightyear_node.errors import ConfigError
from lightyear_node.journal import Row
from lightyear_node.records import fate

Plain = Mapping[str, Any]
_CAUSES = {
    "all": "everybody who was waited for had delivered",
    "grace": "enough had delivered, and the others were waited for as long as agreed",
    "overtaken": "enough other sites had gone on to a later round",
}


@dataclass(slots=True)
class RoundEntry:
    """What was recorded of one round; the parts that have not happened yet are empty."""

    round: int
    sealed: Plain = field(default_factory=dict)
    decided: Plain = field(default_factory=dict)
    committed: Plain = field(default_factory=dict)
    wall_ns: int = 0
    """Of the newest of these."""
    seqs: dict[str, int] = field(default_factory=dict)
    others: list[dict[str, Any]] = field(default_factory=list)
    """Further records of this round: what operators did, what peers said."""

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
            "heads": self.committed.get("heads", {}),
            "records": self.seqs,
            "others": self.others,
        }


def rounds_of(rows: Iterable[Row]) -> dict[int, RoundEntry]:
    """By their number.  Of a round that was begun again, after a disk was lost, as it ended."""
    found: dict[int, RoundEntry] = {}
    for row in rows:
        if type(row.round) is not int or row.kind == "start":
            continue
        entry = found.setdefault(row.round, RoundEntry(row.round))
        body = row.plain_body()
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


def the_round(rounds: Mapping[int, RoundEntry], number: int) -> RoundEntry:
    if number in rounds:
        return rounds[number]
    if not rounds:
        raise ConfigError("no round is recorded yet", hint="the first one is still being trained")
    first, last = min(rounds), max(rounds)
    about = f"this site has recorded rounds {first} to {last}"
    if first < number < last:
        about += "; it left this one out, because the others were ahead"
    raise ConfigError(f"there is no round {number}", hint=about)


def verdict_of(entry: RoundEntry, verdict: Plain) -> dict[str, Any]:
    accepted: Iterable[Plain] = entry.decided.get("accepted", [])
    used = next((one for one in accepted if one.get("peer") == verdict.get("peer")), {})
    reason = str(verdict.get("reason"))
    said = words(reason)
    return {
        "peer": verdict.get("peer"),
        "fate": fate_of(verdict),
        "accepted": bool(verdict.get("accepted")),
        "reason": reason,
        "about": said.about,
        "advice": said.advice,
        "score": verdict.get("score"),
        "threshold": (verdict.get("checks") or {}).get("tau"),
        "weight": verdict.get("weight", 0.0),
        "digest": verdict.get("digest"),
        "generation": used.get("generation", verdict.get("generation")),
        "update_round": used.get("round", verdict.get("round")),
        "guard": [asdict(line) for line in guard_lines(verdict.get("checks") or {})],
    }


def explained(entry: RoundEntry, peer: str) -> dict[str, Any]:
    """Everything about one peer's update in one round."""
    if not entry.decided:
        raise ConfigError(
            f"round {entry.round} is not decided yet",
            hint="`lightyear-node status` says what it waits for",
        )
    names = [str(verdict.get("peer")) for verdict in entry.verdicts]
    if peer not in names:
        near = difflib.get_close_matches(peer, names, n=1, cutoff=0.5)
        known = f"did you mean {near[0]}?" if near else f"it had: {', '.join(names) or 'nobody'}"
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
        "merge": merge_words(entry, peer),
        "harm": entry.committed.get("harm"),
        "model": entry.committed.get("model"),
        "before": entry.sealed.get("metrics", {}),
        "after": entry.committed.get("metrics", {}),
        "records": entry.seqs,
    }


def merge_words(entry: RoundEntry, peer: str | None = None) -> list[str]:
    """What the merge did, in sentences; of `peer` in particular, if one is named."""
    if not entry.committed:
        return ["the merge has not been completed yet"]
    accepted = [str(one.get("peer")) for one in entry.decided.get("accepted", [])]
    harm = entry.committed.get("harm") or {}
    dropped = list(harm.get("dropped") or [])
    merged = [name for name in accepted if name not in dropped]
    if harm.get("kept_local"):
        said = ["our own model was kept: merged with the others it did worse on our data"]
    elif merged:
        said = [f"merged into our model: {', '.join(merged)}"]
    else:
        said = ["nobody was merged: our own model was kept as it was"]
    if dropped:
        said.append(f"dropped again, because the merged model did worse: {', '.join(dropped)}")
    if harm:
        losses = [_attempt(one) for one in harm.get("tried") or []]
        said.append(
            f"loss on our data: {_number(harm.get('loss_before'))} before merging, at most"
            f" {_number(harm.get('limit'))} allowed; measured {', '.join(losses) or 'nothing'}"
        )
    if peer in dropped:
        said.append(f"so {peer} was accepted on its own, but is not part of the result")
    return said


def fate_of(verdict: Plain) -> str:
    return fate(bool(verdict.get("accepted")), str(verdict.get("reason")))


def _attempt(tried: Plain) -> str:
    without = ", ".join(tried.get("without") or [])
    return f"{_number(tried.get('loss'))} " + (f"without {without}" if without else "with all")


def timestamp(wall_ns: Any) -> str:
    """UTC, to the second; of a clock that was never right, the number itself."""
    try:
        return f"{datetime.fromtimestamp(wall_ns / 1e9, UTC):%Y-%m-%dT%H:%M:%SZ}"
    except (OverflowError, ValueError, OSError, TypeError):
        return str(wall_ns)


def _number(value: Any) -> str:
    """What is not finite is recorded as the largest number there is."""
    if not isinstance(value, int | float):
        return "?"
    return "no number" if value == sys.float_info.max else f"{value:.4g}"
