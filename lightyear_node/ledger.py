"""What the journal's rows mean: the node's memory, and the record of every step of a round.

The journal stores plain values; here they are the round's own words.  Each method is one
persistence point: when it returns, the step has happened, whatever crashes next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightyear_node.barrier import Decision, Memory
from lightyear_node.errors import ConfigError
from lightyear_node.history import History
from lightyear_node.journal import Journal, Sign
from lightyear_node.records import (
    Digest,
    Evidence,
    Generation,
    Harm,
    Opinion,
    PeerName,
    Round,
    SignedHead,
    SignedManifest,
    Update,
    Verdict,
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
        find: Callable[[Update], SignedManifest | None] = lambda update: None,
        on_record: Callable[[], None] = lambda: None,
        sign: Sign | None = None,
        models_kept: int = 2,
    ) -> None:
        self._journal = journal
        self._models_kept = models_kept
        self._wall_ns = wall_ns
        self._stamp = stamp
        self._find = find
        self._on_record = on_record
        self._sign = sign
        kept = journal.memory()
        # An empty journal is that of a new site, or of one that has lost its own: the others know.
        self.memory = (
            Memory.from_plain(kept["barrier"])
            if kept.get("barrier")
            else Memory(Generation(0), Round(0), recovering=True)
        )
        self.seen: list[SignedManifest] = [
            SignedManifest.from_plain(plain) for plain in kept.get("seen", [])
        ]
        """What others have signed of that which we vouch for."""
        self._evidence: dict[PeerName, Evidence] = {
            peer: Evidence.from_plain(plain) for peer, plain in kept.get("evidence", {}).items()
        }
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
            SignedManifest.from_plain(kept["manifest"]) if kept.get("manifest") else None
        )
        self._witnessed: dict[PeerName, SignedHead] = {
            peer: SignedHead.from_plain(head) for peer, head in kept.get("witnessed", {}).items()
        }
        self._witnessed_since = False
        self.history = History()
        for record in journal.records():
            self.history.add(record.kind, record.round, record.body, record.wall_ns)
        self._opinions: dict[PeerName, Opinion] = _opinions_from_plain(kept.get("opinions", {}))
        self._told: dict[PeerName, Opinion] = _opinions_from_plain(kept.get("told", {}))

    @property
    def head(self) -> SignedHead | None:
        """What we have last signed of our own history."""
        return self._journal.signed_head

    @property
    def length(self) -> int:
        """How many records there are."""
        return self._journal.length

    def hash_of(self, seq: int) -> str | None:
        return self._journal.hash_of(seq)

    @property
    def witnessed(self) -> Mapping[PeerName, SignedHead]:
        """The newest head that we hold of each peer's journal."""
        return self._witnessed

    def witness(self, peer: PeerName, head: SignedHead | None) -> None:
        """Hold a peer's head, or none of it; durable with whatever is recorded next."""
        if head is None:
            self._witnessed.pop(peer, None)
        else:
            self._witnessed[peer] = head
        self._witnessed_since = True

    def opinion_of(self, peer: PeerName) -> Opinion | None:
        """What we last decided about an update of theirs that we had, without its score."""
        return self._opinions.get(peer)

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
        recovered: bool = False,
    ) -> None:
        """Persistence point 0: this life of the node, before it says a word.

        `schema` is that of the model as it is kept here; `dtype` is as what its updates travel;
        `recovered` if an operator says that the memory is from a backup.
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
        memory = replace(self.memory, recovering=self.memory.recovering or recovered)
        models = self.models or [initial_model]
        # Where the sites have agreed on another rule, the state of this one means nothing.
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
            },
        )
        self.memory = memory
        self.schema, self._dtype, self.models = schema, dtype, models
        self._rule, self.rule_state = rule, rule_state

    def seal(self, update: Update, memory: Memory, work: Work, manifest: SignedManifest) -> None:
        """Persistence point 1: what we are about to announce."""
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

    def decide(self, decision: Decision, memory: Memory, rule_state: Mapping[str, Any]) -> None:
        """Persistence point 2: whose models are merged, and why the others are not."""
        opinions = {
            verdict.peer: _opinion(decision.round, verdict, verdict.digest)
            for verdict in decision.verdicts
            if verdict.digest is not None
        }
        opinions = {**self._opinions, **opinions}
        self._append(
            "decision",
            asdict(decision) | {"rule_state": dict(rule_state)},
            decision.round,
            {
                "barrier": memory.to_plain(),
                "rule_state": dict(rule_state),
                "opinions": _opinions_to_plain(opinions),
            },
        )
        self.memory, self.rule_state, self._opinions = memory, rule_state, opinions

    def commit(
        self,
        round: Round,
        model: Digest,
        memory: Memory,
        metrics: Mapping[str, float],
        harm: Harm | None = None,
    ) -> None:
        """Persistence point 3: the round is over, and our whole history is signed with it.

        `harm` where the merged model was measured before it was kept.
        """
        # A round that changed nothing has the model of the one before, which is kept once.
        before = [kept for kept in self.models if kept != model]
        models = [model, *before][: self._models_kept]
        best = self.best
        loss = metrics.get("loss", math.nan)
        if math.isfinite(loss) and (best is None or loss < best.loss):
            best = Best(model, round, loss)
        self._append(
            "commit",
            {
                "model": model,
                "metrics": dict(metrics),
                "heads": _heads_to_plain(self._witnessed),
            }
            | ({"harm": asdict(harm)} if harm is not None else {}),
            round,
            {
                "barrier": memory.to_plain(),
                "models": models,
                "best": asdict(best) if best else None,
            },
            sign=self._sign,
        )
        self.memory, self.models, self.best = memory, models, best

    def told(self, peer: PeerName, opinion: Opinion) -> bool:
        """What a peer says that it decided about an update of ours; true if that is news.

        Only the first word on each update is recorded, and none on one before it: a peer that
        changes its mind at every heartbeat must not fill our disk.
        """
        before = self._told.get(peer)
        newer = self.offered
        if before is not None and before.digest in newer:
            newer = newer[: newer.index(before.digest)]
        if opinion.digest not in newer:
            return False
        told = {**self._told, peer: opinion}
        body = {"peer": peer, "opinion": asdict(opinion)}
        self._append("told", body, self.memory.round, {"told": _opinions_to_plain(told)})
        self._told = told
        return True

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

    def note(self, kind: str, about: Mapping[str, Any], memory: Memory) -> None:
        """Whatever else has changed the barrier's memory."""
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

    def accuse(self, evidence: Evidence, memory: Memory) -> None:
        """Persistence point 4: a peer has told two stories, and here are both."""
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
        """The proofs against those who are quarantined."""
        return [proof for peer, proof in self._evidence.items() if peer in self.memory.quarantined]

    def operator(self, what: str, about: Mapping[str, Any] | None = None) -> None:
        """A command of an operator that changes nothing in the barrier's memory."""
        self._append("operator", {"command": what, **(about or {})}, self.memory.round, {})

    def _vouched(self, memory: Memory) -> list[SignedManifest]:
        updates = [update for known in memory.vouched.values() for update in known]
        return [signed for signed in map(self._find, updates) if signed is not None]

    def rounds(self) -> list[dict[str, Any]]:
        """The rounds this site has completed, with their verdicts."""
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
        held = {"witnessed": _heads_to_plain(self._witnessed)} if self._witnessed_since else {}
        wall_ns = self._wall_ns()
        self._journal.append(
            kind,
            body,
            wall_ns=wall_ns,
            lamport=self._stamp(),
            round=round,
            remember={**remember, **held},
            sign=sign,
        )
        self._witnessed_since = False
        self.history.add(kind, round, body, wall_ns)
        self._on_record()


def _opinion(round: Round, verdict: Verdict, digest: Digest) -> Opinion:
    return Opinion(round, digest, verdict.accepted, str(verdict.reason))


def _opinions_to_plain(opinions: Mapping[PeerName, Opinion]) -> dict[str, Any]:
    return {peer: asdict(opinion) for peer, opinion in opinions.items()}


def _opinions_from_plain(plain: Mapping[str, Any]) -> dict[PeerName, Opinion]:
    return {PeerName(peer): Opinion(**opinion) for peer, opinion in plain.items()}


def _heads_to_plain(heads: Mapping[PeerName, SignedHead]) -> dict[str, Any]:
    return {peer: head.to_plain() for peer, head in heads.items()}
