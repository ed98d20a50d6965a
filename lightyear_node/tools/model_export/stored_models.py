"""Lists the models in a state directory by round, with their journal records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightyear_node.audit.export import open_records, valid_rows
from lightyear_node.audit.rounds import RoundEntry, rounds_of
from lightyear_node.errors import ConfigError
from lightyear_node.storage.hash_chain import StoredRecord
from lightyear_node.tools.model_export import ModelKind
from lightyear_node.types import Served

BEST, LAST = "best", "last"
MODELS, CARRY = "models", "carry"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The files of one completed round; a path is None if the file was deleted."""

    entry: RoundEntry
    model: Path | None
    carry: Path | None
    carry_digest: str | None
    best: bool
    last: bool
    size: int = 0
    """Bytes of the model's file."""

    @property
    def digest(self) -> str:
        return str(self.entry.committed["model"])

    def names(self) -> list[str]:
        return [name for name, holds in ((BEST, self.best), (LAST, self.last)) if holds]


@dataclass(frozen=True, slots=True)
class RoundStart:
    """What a round starts from: the model and the rule's state."""

    before: str | None = None
    rule_state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateRecord:
    """A snapshot of a state directory's journal."""

    directory: Path
    memory: Mapping[str, Any]
    rounds: Mapping[int, RoundEntry]
    starts: Sequence[Mapping[str, Any]]
    """The bodies of the `start` records, the newest last."""
    heads: Mapping[int, tuple[Any, Any]]
    newest: tuple[int, str]
    contexts: Mapping[int, RoundStart]
    """What each sealed round started from."""
    now: RoundStart
    """What the next round starts from."""
    bad: int | None
    """The first record that breaks the hash chain; it and all later ones are left out."""

    @property
    def about(self) -> Mapping[str, Any]:
        return self.starts[-1] if self.starts else {}

    def completed(self) -> dict[int, StoredModel]:
        rounds = {number: one for number, one in self.rounds.items() if one.committed}
        best = (self.memory.get("best") or {}).get("round")
        last = max(rounds, default=None)
        return {
            number: self._stored(entry, best=number == best, last=number == last)
            for number, entry in sorted(rounds.items())
        }

    def _stored(self, entry: RoundEntry, *, best: bool, last: bool) -> StoredModel:
        model = self.directory / MODELS / f"{entry.committed['model']}.safetensors"
        digest = self.carry_of(entry)
        carry = self.directory / CARRY / digest if digest else None
        size = _size(model)
        return StoredModel(
            entry,
            model=model if size is not None else None,
            carry=carry if carry is not None and _size(carry) is not None else None,
            carry_digest=digest,
            best=best,
            last=last,
            size=size or 0,
        )

    def carry_of(self, entry: RoundEntry) -> str | None:
        """Digest of the round's training state; earlier versions recorded only the newest."""
        work = self.memory.get("work") or {}
        update = entry.sealed.get("update") or {}
        if update.get("digest") == work.get("outgoing"):
            return work.get("carry")
        return entry.sealed.get("carry")


def read_record(directory: Path) -> StateRecord:
    """Read the journal up to the first record that breaks the hash chain."""
    with open_records(directory) as source:
        rows, bad = valid_rows(source)
        memory = {key: _plain(value) for key, value in (source.memory or {}).items()}
        heads = source.heads
    newest = (rows[-1].seq, rows[-1].hash) if rows else (0, "")
    starts = [row.plain_body() for row in rows if row.kind == "start"]
    contexts, now = _contexts(rows)
    number = bad.seq if bad is not None else None
    return StateRecord(
        directory, memory, rounds_of(rows), starts, heads, newest, contexts, now, number
    )


def _contexts(rows: Sequence[StoredRecord]) -> tuple[dict[int, RoundStart], RoundStart]:
    now, rule = RoundStart(), None
    found: dict[int, RoundStart] = {}
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
            # As in the round journal: the state of another rule is discarded.
            kept = now.rule_state if body.get("rule") == rule else {}
            now, rule = RoundStart(before, kept), body.get("rule")
        else:
            now = replace(now, before=body.get("model"))
    return found, now


def select_model(record: StateRecord, wanted: str) -> StoredModel:
    """The model of `best`, `last` or a round's number; its files may be deleted."""
    completed = record.completed()
    if not completed:
        raise ConfigError(
            "no round has been completed here yet",
            hint="`lightyear-node status` shows what the node is doing",
        )
    if wanted in (BEST, LAST):
        found = next((one for one in completed.values() if wanted in one.names()), None)
        if found is None:
            raise ConfigError(
                "no round has a best model: no loss was a finite number",
                hint="name a round, or `last`",
            )
        return found
    if not wanted.isdecimal():
        raise ConfigError(f"`{wanted[:40]}` is no round", hint="write best, last or a number")
    number = int(wanted[:20])
    if number not in completed:
        raise ConfigError(
            f"round {number} has not been completed here",
            hint=f"completed: {_listed(completed)}; see `lightyear-node model list`",
        )
    return completed[number]


def serves_alone(record: StateRecord) -> bool:
    """Whether the newest round's comparison chose the model that was trained alone."""
    last = next(reversed(record.completed().values()), None)
    worth = (last.entry.committed.get("worth") if last is not None else None) or {}
    return worth.get("served") == Served.ALONE


def no_longer_kept(record: StateRecord, kept: StoredModel, which: ModelKind) -> ConfigError:
    """The error for a round whose model file was deleted; it lists the existing ones."""
    existing = [
        number
        for number, one in record.completed().items()
        if (one.model if which is ModelKind.SHARED else one.carry) is not None
    ]
    if which is not ModelKind.SHARED:
        more = f"only the newest round's {which} model is kept"
        more += "; `--which shared` exports the shared model"
    else:
        more = "`keep: {models: N}` in node.yaml keeps the models of the last N rounds"
    return ConfigError(
        f"the {which} model of round {kept.entry.round} is no longer kept",
        hint=f"kept: {_listed(existing)}; {more}",
    )


def _listed(rounds: Sequence[int] | Mapping[int, Any]) -> str:
    numbers = sorted(rounds)
    if not numbers:
        return "no round"
    shown = ", ".join(map(str, numbers[-10:]))
    return f"round{'s' * (len(numbers) > 1)} {'… ' * (len(numbers) > 10)}{shown}"


def _size(path: Path) -> int | None:
    """None if the file does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def _plain(value: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, TypeError):
        return None
