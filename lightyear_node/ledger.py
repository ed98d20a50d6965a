"""What the journal's rows mean: the node's memory, and the record of every step of a round.

The journal stores plain values; here they are the round's own words.  Each method is one
persistence point: when it returns, the step has happened, whatever crashes next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightyear_node.barrier import Decision, Memory
from lightyear_node.errors import ConfigError
from lightyear_node.journal import Journal
from lightyear_node.records import (
    Digest,
    Generation,
    Harm,
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


class Ledger:
    def __init__(
        self,
        journal: Journal,
        *,
        wall_ns: Callable[[], int],
        stamp: Callable[[], int],
        on_record: Callable[[], None] = lambda: None,
    ) -> None:
        self._journal = journal
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
        """The model of the last completed round, and the one before it."""
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
        self.schema, self._dtype = schema, dtype
        self.models = self.models or [initial_model]
        if self._rule != rule:
            # The sites have agreed on another rule, to which this one's state means nothing.
            self.rule_state = {}
        self._rule = rule
        self._append(
            "start",
            {**about, "rule": rule},
            self.memory.round,
            {
                "schema": schema,
                "dtype": dtype,
                "models": self.models,
                "barrier": self.memory.to_plain(),
                "rule": rule,
                "rule_state": dict(self.rule_state),
            },
        )

    def seal(self, update: Update, memory: Memory, work: Work, manifest: SignedManifest) -> None:
        """Persistence point 1: what we are about to announce."""
        self.memory, self.work, self.manifest = memory, work, manifest
        self.offered = [work.outgoing, *self.offered][:2]
        self._append(
            "seal",
            {"update": asdict(update), "samples": work.samples, "metrics": dict(work.metrics)},
            update.round,
            {
                "barrier": memory.to_plain(),
                "work": asdict(work),
                "offered": self.offered,
                "manifest": _manifest_to_plain(manifest),
            },
        )

    def decide(self, decision: Decision, memory: Memory, rule_state: Mapping[str, Any]) -> None:
        """Persistence point 2: whose models are merged, and why the others are not."""
        self.memory, self.rule_state = memory, rule_state
        self._append(
            "decision",
            asdict(decision) | {"rule_state": dict(rule_state)},
            decision.round,
            {"barrier": memory.to_plain(), "rule_state": dict(rule_state)},
        )

    def commit(
        self,
        round: Round,
        model: Digest,
        memory: Memory,
        metrics: Mapping[str, float],
        harm: Harm | None = None,
    ) -> None:
        """Persistence point 3: the round is over; `harm` where the merged model was measured."""
        self.memory, self.models = memory, [model, *self.models][:2]
        self._append(
            "commit",
            {"model": model, "metrics": dict(metrics)}
            | ({"harm": asdict(harm)} if harm is not None else {}),
            round,
            {"barrier": memory.to_plain(), "models": self.models},
        )

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
                if "harm" in body:
                    found[record.round].update(harm=body["harm"])
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
