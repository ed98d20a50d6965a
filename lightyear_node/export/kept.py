"""Which models a state directory holds, by round, and what its record says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightyear_node.audit.export import opened
from lightyear_node.audit.rounds import RoundEntry, rounds_of
from lightyear_node.errors import ConfigError
from lightyear_node.export import Which
from lightyear_node.journal import Row, unchained

BEST, LAST = "best", "last"
MODELS, CARRY = "models", "carry"


@dataclass(frozen=True, slots=True)
class Kept:
    """What is there of one completed round; a path is None where the file has been deleted."""

    entry: RoundEntry
    model: Path | None
    carry: Path | None
    carry_digest: str | None
    best: bool
    last: bool
    size: int = 0
    """Of the model's file."""

    @property
    def digest(self) -> str:
        return str(self.entry.committed["model"])

    def names(self) -> list[str]:
        return [name for name, holds in ((BEST, self.best), (LAST, self.last)) if holds]


@dataclass(frozen=True, slots=True)
class Context:
    """What a round begins with: the model, and what the rule wants to know again."""

    before: str | None = None
    rule_state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Record:
    """A state directory's memory and history, at one moment."""

    directory: Path
    memory: Mapping[str, Any]
    rounds: Mapping[int, RoundEntry]
    starts: Sequence[Mapping[str, Any]]
    """What the node said of itself whenever it began; the newest last."""
    heads: Mapping[int, tuple[Any, Any]]
    newest: tuple[int, str]
    contexts: Mapping[int, Context]
    """In what every sealed round was trained and judged."""
    now: Context
    """In what the next one will be."""
    bad: int | None
    """The first record that does not follow from the one before it; it and all later are left out.
    """

    @property
    def about(self) -> Mapping[str, Any]:
        return self.starts[-1] if self.starts else {}

    def completed(self) -> dict[int, Kept]:
        rounds = {number: one for number, one in self.rounds.items() if one.committed}
        best = (self.memory.get("best") or {}).get("round")
        last = max(rounds, default=None)
        return {
            number: self._kept(entry, best=number == best, last=number == last)
            for number, entry in sorted(rounds.items())
        }

    def _kept(self, entry: RoundEntry, *, best: bool, last: bool) -> Kept:
        model = self.directory / MODELS / f"{entry.committed['model']}.safetensors"
        digest = self.carry_of(entry)
        carry = self.directory / CARRY / digest if digest else None
        size = _size(model)
        return Kept(
            entry,
            model=model if size is not None else None,
            carry=carry if carry is not None and _size(carry) is not None else None,
            carry_digest=digest,
            best=best,
            last=last,
            size=size or 0,
        )

    def carry_of(self, entry: RoundEntry) -> str | None:
        """Earlier versions have recorded it for the newest sealed round only."""
        work = self.memory.get("work") or {}
        update = entry.sealed.get("update") or {}
        if update.get("digest") == work.get("outgoing"):
            return work.get("carry")
        return entry.sealed.get("carry")


def read_record(directory: Path) -> Record:
    """The sound part of the record: what somebody has altered is not told as if it had happened."""
    with opened(directory) as source:
        rows = list(source.rows())
        memory = {key: _plain(value) for key, value in (source.memory or {}).items()}
        heads = source.heads
    bad = next(unchained(rows), None)
    if bad is not None:
        rows = rows[: rows.index(bad)]
    newest = (rows[-1].seq, rows[-1].hash) if rows else (0, "")
    starts = [row.plain_body() for row in rows if row.kind == "start"]
    contexts, now = _contexts(rows)
    number = bad.seq if bad is not None else None
    return Record(directory, memory, rounds_of(rows), starts, heads, newest, contexts, now, number)


def _contexts(rows: Sequence[Row]) -> tuple[dict[int, Context], Context]:
    now, rule = Context(), None
    found: dict[int, Context] = {}
    for row in rows:
        if row.kind not in ("start", "seal", "decision", "commit", "fallback"):
            continue
        body = row.plain_body()
        if row.kind == "seal":
            found[row.round] = now
        elif row.kind == "decision":
            now = replace(now, rule_state=body.get("rule_state") or {})
        elif row.kind == "start":
            before = now.before or body.get("initial_model")
            # As in the ledger: what another rule remembered means nothing.
            kept = now.rule_state if body.get("rule") == rule else {}
            now, rule = Context(before, kept), body.get("rule")
        else:
            now = replace(now, before=body.get("model"))
    return found, now


def chosen(record: Record, wanted: str) -> Kept:
    """`best`, `last` or a round's number; its files may be gone."""
    completed = record.completed()
    if not completed:
        raise ConfigError(
            "no round has been completed here yet",
            hint="`lightyear-node status` says what the node is doing",
        )
    if wanted in (BEST, LAST):
        found = next((one for one in completed.values() if wanted in one.names()), None)
        if found is None:
            raise ConfigError(
                "no round has a best model: none had a loss that is a number",
                hint="name a round, or `last`",
            )
        return found
    if not wanted.isdecimal():
        raise ConfigError(f"`{wanted[:40]}` is no round", hint="write best, last or a number")
    number = int(wanted[:20])
    if number not in completed:
        raise ConfigError(
            f"round {number} has not been completed here",
            hint=f"completed are {_listed(completed)}; `lightyear-node model list` says more",
        )
    return completed[number]


def gone(record: Record, kept: Kept, which: Which) -> ConfigError:
    """The file of a round's model is no longer kept."""
    there = [
        number
        for number, one in record.completed().items()
        if (one.model if which is Which.SHARED else one.carry) is not None
    ]
    if which is Which.PERSONAL:
        more = "the personal model is kept of the newest round only"
        more += "; `--which shared` takes the shared model"
    else:
        more = "`keep: {models: N}` in node.yaml keeps the models of the last N rounds"
    return ConfigError(
        f"the {which} model of round {kept.entry.round} is no longer kept",
        hint=f"there are those of {_listed(there)}; {more}",
    )


def _listed(rounds: Sequence[int] | Mapping[int, Any]) -> str:
    numbers = sorted(rounds)
    if not numbers:
        return "no round"
    shown = ", ".join(map(str, numbers[-10:]))
    return f"round{'s' * (len(numbers) > 1)} {'… ' * (len(numbers) > 10)}{shown}"


def _size(path: Path) -> int | None:
    """None if it is not there, or no longer."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _plain(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, TypeError):
        return None
