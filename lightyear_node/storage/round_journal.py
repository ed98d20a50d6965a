"""The records of a round, and the node's memory between them.

The journal stores plain values; this module gives them meaning.  Each method that writes is one
persistence point: when it returns, the step survives any crash.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lightyear_node.errors import ConfigError, JournalCorrupt
from lightyear_node.protocol.durable_state import Decision, DurableState
from lightyear_node.storage.hash_chain import canonical
from lightyear_node.storage.history import ROUNDS_MAX, History
from lightyear_node.storage.journal import Journal, Sign
from lightyear_node.storage.journal_memory import (
    BestModel,
    JournalMemory,
    TrainingResult,
    heads_to_plain,
    opinions_to_plain,
)
from lightyear_node.types import (
    Digest,
    Evidence,
    Harm,
    Opinion,
    PeerName,
    Round,
    SignedHead,
    SignedManifest,
    Update,
    Worth,
)


class RoundJournal:
    """Writes the records of a node; attributes change only after their record is durable."""

    def __init__(
        self,
        journal: Journal,
        *,
        wall_ns: Callable[[], int],
        find: Callable[[Update], SignedManifest | None] = lambda update: None,
        on_record: Callable[[], None] = lambda: None,
        sign: Sign | None = None,
        models_kept: int = 2,
    ) -> None:
        self._journal = journal
        self._models_kept = models_kept
        self._wall_ns = wall_ns
        self._find = find
        self._on_record = on_record
        self._sign = sign
        known = _read_memory(journal)
        self.memory = known.barrier
        self.seen = known.seen
        """Signed manifests of the updates that we vouch for."""
        self.schema = known.schema
        self.models = known.models
        """The model of the last completed round, and some before it."""
        self.best = known.best
        self.offered = known.offered
        """Our last two announced updates: a transfer of the older one may still be running."""
        self.rule_state = known.rule_state
        """State that the rule keeps between rounds, such as the peers' reputation."""
        self.worth = known.worth
        """The newest comparison with the model that never merges, if there is one."""
        self.work = known.work
        self.manifest = known.manifest
        self._dtype = known.dtype
        self._rule = known.rule
        self._evidence = known.evidence
        self._witnessed = known.witnessed
        self._witnessed_changed = False
        self._opinions = known.opinions
        self._opinions_on_us = known.opinions_on_us
        self.history = History()
        for record in journal.recent(max(0, self.memory.round - ROUNDS_MAX)):
            self.history.add(record.kind, record.round, record.body, record.wall_ns)

    @property
    def head(self) -> SignedHead | None:
        """The newest signed head of our own journal."""
        return self._journal.signed_head

    @property
    def length(self) -> int:
        """The number of records."""
        return self._journal.length

    @property
    def segmented(self) -> bool:
        """Whether older records are in closed segments."""
        return self._journal.segmented

    def hash_of(self, seq: int) -> str | None:
        """The hash of a record; None if it does not exist, or is in an archived segment."""
        return self._journal.hash_of(seq)

    @property
    def witnessed(self) -> Mapping[PeerName, SignedHead]:
        """The newest head of each peer's journal that we hold."""
        return self._witnessed

    def witness(self, peer: PeerName, head: SignedHead | None) -> None:
        """Hold a peer's head, or drop it if None; durable with the next record."""
        if head is None:
            self._witnessed.pop(peer, None)
        else:
            self._witnessed[peer] = head
        self._witnessed_changed = True

    def opinion_of(self, peer: PeerName) -> Opinion | None:
        """Our last verdict on an update that the peer delivered, without the score."""
        return self._opinions.get(peer)

    @property
    def model(self) -> Digest:
        """The model that the next training starts from."""
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
        recovered: bool = False,
    ) -> None:
        """Persistence point 0: a start of the node, before it sends anything.

        `schema` is that of the stored model; `dtype` is the element type on the wire; `recovered`
        if the operator states that the state is from a backup.
        """
        if self.schema is not None and self._dtype != dtype:
            # Our last announcement was signed with the old type.  Peers with the new type would
            # refuse it, and no round could be completed.
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
        memory = replace(self.memory, recovering=self.memory.recovering or recovered)
        models = self.models or [initial_model]
        # The state of another rule is not valid for this one.
        rule_state = self.rule_state if self._rule == rule else {}
        self._append(
            "start",
            {**about, "rule": rule},
            memory.round,
            {
                "schema": schema,
                "dtype": dtype,
                "models": models,
                "barrier": memory.to_plain(),
                "rule": rule,
                "rule_state": dict(rule_state),
                # For readers of a journal whose first segments are archived.
                "begun": {name: about.get(name) for name in ("site", "federation", "signing_key")},
            },
        )
        self.memory = memory
        self.schema, self._dtype, self.models = schema, dtype, models
        self._rule, self.rule_state = rule, rule_state

    def seal(
        self, update: Update, memory: DurableState, work: TrainingResult, manifest: SignedManifest
    ) -> None:
        """Persistence point 1: the update that will be announced."""
        offered = [work.outgoing, *self.offered][:2]
        self._append(
            "seal",
            {
                "update": asdict(update),
                "own": work.own,
                "carry": work.carry,
                "samples": work.samples,
                "metrics": dict(work.metrics),
            },
            update.round,
            {
                "barrier": memory.to_plain(),
                "work": asdict(work),
                "offered": offered,
                "manifest": manifest.to_plain(),
            },
        )
        self.memory, self.work, self.manifest, self.offered = memory, work, manifest, offered

    def decide(
        self, decision: Decision, memory: DurableState, rule_state: Mapping[str, Any]
    ) -> None:
        """Persistence point 2: which updates are merged, and why the others are not."""
        opinions = {
            one.peer: Opinion(decision.round, one.digest, one.accepted, str(one.reason))
            for one in decision.verdicts
            if one.digest is not None
        }
        opinions = {**self._opinions, **opinions}
        details = {one.peer: dict(one.details) for one in decision.verdicts if one.details}
        self._append(
            "decision",
            decision.to_plain()
            | {"rule_state": dict(rule_state)}
            | ({"details": details} if details else {}),
            decision.round,
            {
                "barrier": memory.to_plain(),
                "rule_state": dict(rule_state),
                "opinions": opinions_to_plain(opinions),
            },
        )
        self.memory, self.rule_state, self._opinions = memory, rule_state, opinions

    def commit(
        self,
        round: Round,
        model: Digest,
        memory: DurableState,
        metrics: Mapping[str, float],
        harm: Harm | None = None,
        left_out: Sequence[PeerName] = (),
        worth: Worth | None = None,
    ) -> None:
        """Persistence point 3: the round is over; the whole history is signed.

        `harm` is the result of the merge check, if there was one; `left_out` are accepted peers
        whose files were lost before they could be merged; `worth` is the comparison with the model
        that never merges, if there is one.
        """
        # A round that changed nothing has the same model as the round before.
        before = [kept for kept in self.models if kept != model]
        models = [model, *before][: self._models_kept]
        best = self.best
        loss = metrics.get("loss", math.nan)
        if math.isfinite(loss) and (best is None or loss < best.loss):
            best = BestModel(model, round, loss)
        self._append(
            "commit",
            {
                "model": model,
                "metrics": dict(metrics),
                "heads": heads_to_plain(self._witnessed),
            }
            | ({"harm": asdict(harm)} if harm is not None else {})
            | ({"left_out": list(left_out)} if left_out else {})
            | ({"worth": worth.to_plain()} if worth is not None else {}),
            round,
            {
                "barrier": memory.to_plain(),
                "models": models,
                "best": asdict(best) if best else None,
            }
            | ({"worth": worth.to_plain() if worth else None} if worth or self.worth else {}),
            sign=self._sign,
        )
        self.memory, self.models, self.best, self.worth = memory, models, best, worth

    def record_opinion(self, peer: PeerName, opinion: Opinion) -> bool:
        """Record a peer's verdict on an update of ours; False if nothing was recorded.

        Only the first verdict on each update is recorded, and none on older updates: a peer that
        changes its verdict at every heartbeat must not fill our disk.
        """
        before = self._opinions_on_us.get(peer)
        newer = self.offered
        if before is not None and before.digest in newer:
            newer = newer[: newer.index(before.digest)]
        if opinion.digest not in newer:
            return False
        opinions = {**self._opinions_on_us, peer: opinion}
        body = {"peer": peer, "opinion": asdict(opinion)}
        self._append("told", body, self.memory.round, {"told": opinions_to_plain(opinions)})
        self._opinions_on_us = opinions
        return True

    def fall_back(self, model: Digest, damaged: Sequence[Digest]) -> None:
        """The newest models are damaged: training continues from an older, intact one."""
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
        """Record a config reload; `certificate` is the fingerprint of our own from now on."""
        body = {**changes, "certificate": certificate, "agreement": agreement}
        self._append("settings", body, self.memory.round, {})

    def note(self, kind: str, about: Mapping[str, Any], memory: DurableState) -> None:
        """Record another change of the barrier's durable state."""
        seen = self._vouched(memory)
        body = dict(about)
        if kind == "witness":
            known = {signed.signature for signed in self.seen}
            news = [signed for signed in seen if signed.signature not in known]
            body["updates"] = [signed.to_plain() for signed in news]
        self._append(
            kind,
            body,
            memory.round,
            {
                "barrier": memory.to_plain(),
                "seen": [signed.to_plain() for signed in seen],
            },
        )
        self.memory = memory
        if kind == "witness":
            self.seen = seen

    def accuse(self, evidence: Evidence, memory: DurableState) -> None:
        """Persistence point 4: a peer signed two updates for one round; store both."""
        update = evidence.first.manifest.update
        proofs = {**self._evidence, update.peer: evidence}
        plain = {peer: proof.to_plain() for peer, proof in proofs.items()}
        self._append(
            "evidence",
            {"peer": update.peer, **plain[update.peer]},
            memory.round,
            {"barrier": memory.to_plain(), "evidence": plain},
        )
        self.memory, self._evidence = memory, proofs

    @property
    def evidence(self) -> list[Evidence]:
        """The evidence against quarantined peers."""
        return [proof for peer, proof in self._evidence.items() if peer in self.memory.quarantined]

    def operator(self, what: str, about: Mapping[str, Any] | None = None) -> None:
        """Record an operator command that does not change the barrier's durable state."""
        self._append("operator", {"command": what, **(about or {})}, self.memory.round, {})

    def _vouched(self, memory: DurableState) -> list[SignedManifest]:
        updates = [update for known in memory.vouched.values() for update in known]
        return [signed for signed in map(self._find, updates) if signed is not None]

    def rounds(self) -> list[dict[str, Any]]:
        """The completed rounds, with their verdicts."""
        return self.history.rounds()

    def _append(
        self,
        kind: str,
        body: Mapping[str, Any],
        round: int,
        remember: Mapping[str, Any],
        *,
        sign: Sign | None = None,
    ) -> None:
        held = {"witnessed": heads_to_plain(self._witnessed)} if self._witnessed_changed else {}
        wall_ns = self._wall_ns()
        self._journal.append(
            kind,
            body,
            wall_ns=wall_ns,
            lamport=self._journal.length + 1,
            round=round,
            remember={**remember, **held},
            sign=sign,
        )
        self._witnessed_changed = False
        # In the form a restart would read, including key order: trackers write it to files.
        self.history.add(kind, round, json.loads(canonical(body)), wall_ns)
        self._on_record()


def _read_memory(journal: Journal) -> JournalMemory:
    try:
        return JournalMemory.from_plain(journal.memory())
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        # Only in journals of earlier versions, whose records did not cover the memory.
        raise JournalCorrupt(
            f"{journal.path}: what it remembers cannot be understood: {problem!r}",
            hint="`lightyear-node audit verify` says more; restore the whole state directory"
            " from a backup, or move it away to start over",
        ) from problem
