"""What the journal's rows mean: the node's memory, and the record of every step of a round.

The journal stores plain values; here they are the round's own words.  Each method is one
persistence point: when it returns, the step has happened, whatever crashes next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightyear_node.barrier import Decision, Memory
from lightyear_node.errors import ConfigError
from lightyear_node.journal import Journal
from lightyear_node.records import (
    Digest,
    Generation,
    Manifest,
    Round,
    SignedManifest,
    Update,
)


@dataclass(frozen=True, slots=True)
class Work:
    """What training a round has produced, by digest.

    `own` is the trained model, `outgoing` what the peers get (the same, unless it is rounded for
    them or a malfunction is being played), `carry` the optimizer's state.
    """

    own: Digest
    outgoing: Digest
    carry: Digest
    raw_bytes: int
    samples: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Best:
    """The merged model that had the lowest loss on this site's own data."""

    model: Digest
    round: int
    loss: float


class Ledger:
    """What it says it remembers is durable: it changes when the record has been written."""

    def __init__(
        self,
        journal: Journal,
        *,
        wall_ns: Callable[[], int],
        stamp: Callable[[], int],
        on_record: Callable[[], None] = lambda: None,
        models_kept: int = 2,
    ) -> None:
        self._journal = journal
        self._models_kept = models_kept
        self._wall_ns = wall_ns
        self._stamp = stamp
        self._on_record = on_record
        kept = journal.memory()
        self.memory = (
            Memory.from_plain(kept["barrier"])
            if kept.get("barrier")
            else Memory(Generation(0), Round(0))
        )
        self.schema: Digest | None = kept.get("schema")
        self._dtype: str = kept.get("dtype", "float32")
        self.models: list[Digest] = kept.get("models", [])
        """The model of the last completed round, and some of those before it."""
        self.best: Best | None = Best(**kept["best"]) if kept.get("best") else None
        self.offered: list[Digest] = kept.get("offered", [])
        """Our last two announced updates: a transfer of the older one may still be running."""
        self.rule_state: Mapping[str, Any] = kept.get("rule_state", {})
        """What the rule wants to know again in the next round, such as the peers' reputation."""
        self._rule: str | None = kept.get("rule")
        self.work: Work | None = Work(**kept["work"]) if kept.get("work") else None
        self.manifest: SignedManifest | None = (
            _manifest_from_plain(kept["manifest"]) if kept.get("manifest") else None
        )

    @property
    def model(self) -> Digest:
        """What the next training starts from."""
        return self.models[0]

    @property
    def kept_models(self) -> set[Digest]:
        return {*self.models} | ({self.best.model} if self.best else set())

    def start(
        self,
        *,
        schema: Digest,
        initial_model: Digest,
        rule: str,
        about: Mapping[str, Any],
        dtype: str = "float32",
    ) -> None:
        """Persistence point 0: this life of the node, before it says a word.

        `schema` is that of the model as it is kept here; `dtype` is as what its updates travel.
        """
        if self.schema is not None and self._dtype != dtype:
            # What we have announced last is signed in the old type, and everybody who has the new
            # one would refuse it: no round could ever be completed.
            raise ConfigError(
                f"exchange.dtype is {dtype}, but this state directory was begun with {self._dtype}",
                hint=f"write `dtype: {self._dtype}` under `exchange` in every site's peers.yaml,"
                " or set another `state_dir` at every site",
            )
        if self.schema is not None and self.schema != schema:
            raise ConfigError(
                "the model's tensors have changed since this state directory was begun",
                hint="go back to the task, and to the `exchange` in peers.yaml, that it was begun"
                " with, or set another `state_dir`",
            )
        models = self.models or [initial_model]
        # Where the sites have agreed on another rule, the state of this one means nothing.
        rule_state = self.rule_state if self._rule == rule else {}
        self._append(
            "start",
            {**about, "rule": rule},
            self.memory.round,
            {
                "schema": schema,
                "dtype": dtype,
                "models": models,
                "barrier": self.memory.to_plain(),
                "rule": rule,
                "rule_state": dict(rule_state),
            },
        )
        self.schema, self._dtype, self.models = schema, dtype, models
        self._rule, self.rule_state = rule, rule_state

    def seal(self, update: Update, memory: Memory, work: Work, manifest: SignedManifest) -> None:
        """Persistence point 1: what we are about to announce."""
        offered = [work.outgoing, *self.offered][:2]
        self._append(
            "seal",
            {"update": asdict(update), "samples": work.samples, "metrics": dict(work.metrics)},
            update.round,
            {
                "barrier": memory.to_plain(),
                "work": asdict(work),
                "offered": offered,
                "manifest": _manifest_to_plain(manifest),
            },
        )
        self.memory, self.work, self.manifest, self.offered = memory, work, manifest, offered

    def decide(self, decision: Decision, memory: Memory, rule_state: Mapping[str, Any]) -> None:
        """Persistence point 2: whose models are merged, and why the others are not."""
        self._append(
            "decision",
            asdict(decision) | {"rule_state": dict(rule_state)},
            decision.round,
            {"barrier": memory.to_plain(), "rule_state": dict(rule_state)},
        )
        self.memory, self.rule_state = memory, rule_state

    def commit(
        self, round: Round, model: Digest, memory: Memory, metrics: Mapping[str, float]
    ) -> None:
        """Persistence point 3: the round is over."""
        # A round that changed nothing has the model of the one before, which is kept once.
        before = [kept for kept in self.models if kept != model]
        models = [model, *before][: self._models_kept]
        best = self.best
        loss = metrics.get("loss", math.nan)
        if math.isfinite(loss) and (best is None or loss < best.loss):
            best = Best(model, round, loss)
        self._append(
            "commit",
            {"model": model, "metrics": dict(metrics)},
            round,
            {
                "barrier": memory.to_plain(),
                "models": models,
                "best": asdict(best) if best else None,
            },
        )
        self.memory, self.models, self.best = memory, models, best

    def fall_back(self, model: Digest, damaged: Sequence[Digest]) -> None:
        """The newest models are damaged: training goes on from an older one, which is sound."""
        models = self.models[self.models.index(model) :]
        best = None if self.best and self.best.model in damaged else self.best
        self._append(
            "fallback",
            {"model": model, "damaged": list(damaged)},
            self.memory.round,
            {"models": models, "best": asdict(best) if best else None},
        )
        self.models, self.best = models, best

    def settings(self, changes: Mapping[str, Any], *, certificate: str, agreement: Digest) -> None:
        """What an operator changed while the node runs; `certificate` is our own from now on."""
        body = {**changes, "certificate": certificate, "agreement": agreement}
        self._append("settings", body, self.memory.round, {})

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds this site has completed, with their verdicts."""
        found: dict[int, dict[str, Any]] = {}
        for record in self._journal.records():
            body = record.body
            if record.kind == "seal":
                found[record.round] = {"round": record.round, "local": body["metrics"]}
            elif record.kind == "decision":
                found.setdefault(record.round, {"round": record.round}).update(
                    cause=body["cause"], why=body["why"], verdicts=body["verdicts"]
                )
            elif record.kind == "commit":
                found[record.round].update(model=body["model"], merged=body["metrics"])
        return [entry for entry in found.values() if "model" in entry]

    def _append(
        self, kind: str, body: Mapping[str, Any], round: int, remember: Mapping[str, Any]
    ) -> None:
        self._journal.append(
            kind,
            body,
            wall_ns=self._wall_ns(),
            lamport=self._stamp(),
            round=round,
            remember=remember,
        )
        self._on_record()


def _manifest_to_plain(signed: SignedManifest) -> dict[str, Any]:
    return {"manifest": asdict(signed.manifest), "signature": signed.signature.hex()}


def _manifest_from_plain(plain: Mapping[str, Any]) -> SignedManifest:
    fields = dict(plain["manifest"])
    update = Update(**fields.pop("update"))
    return SignedManifest(Manifest(update=update, **fields), bytes.fromhex(plain["signature"]))
