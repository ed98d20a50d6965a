"""Sites that have completed some rounds, in their homes: real models and records, without nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lightyear_node import __version__
from lightyear_node.barrier import Cause, Decision, Memory
from lightyear_node.config.agreement import ExchangeTerms, RuleTerms
from lightyear_node.config.site import TaskEntry
from lightyear_node.home import Home, State, load_home
from lightyear_node.journal import Journal
from lightyear_node.lab.federation import PEERS_NAME, SiteHome, lay_out, site_names
from lightyear_node.ledger import Ledger, Work
from lightyear_node.records import Digest, Generation, Manifest, Round, Update
from lightyear_node.store import Store
from lightyear_node.worker.jobs import Candidate, verdict_from_plain, verdict_to_plain
from lightyear_node.worker.site import Site
from lightyear_node.worker.task import build_task

TASK = TaskEntry(entry="tests.unit.ward:build")
SEED = 7


class Graduate:
    """One site: the worker's code in this process, and what the node would have recorded."""

    def __init__(self, at: SiteHome, keep_models: int) -> None:
        self.at, self.name = at, at.name
        self.home: Home = load_home(
            at.directory, at.directory / PEERS_NAME, environment={}, flags={}, now=datetime.now(UTC)
        )
        opening = self.home.opening()
        names = ("site_name", "site_index", "site_count", "seed")
        about = (at.name, opening["sites"].index(at.name), len(opening["sites"]), SEED)
        context = dict(zip(names, about, strict=True))
        self.site = Site(
            build_task(TASK.entry, {}, context),
            name=at.name,
            seed=SEED,
            rule=self.home.rule,
            rounds=self.home.agreement.rounds,
            device="cpu",
            exchange=self.home.agreement.exchange,
        )
        self.state = State(at.state_dir)
        stamps = itertools.count(1)
        self.ledger = Ledger(
            self.state.journal,
            wall_ns=lambda: 1_700_000_000_000_000_000 + self.state.journal.length * 10**9,
            stamp=lambda: next(stamps),
            sign=lambda seq, hash: self.home.identity.sign_head("demo", seq, hash),
            models_kept=keep_models,
        )
        initial = self._made(self.state.models, lambda path: self.site.write_initial(path))
        self.ledger.start(
            schema=Digest("5c" * 32),
            initial_model=initial,
            rule=self.home.rule.name,
            about={
                "site": at.name,
                "federation": "demo",
                "signing_key": self.home.identity.certificate.signing_key.hex(),
                "version": __version__,
                "initial_model": initial,
                "task": TASK.entry,
                "seed": SEED,
                "sites": opening["sites"],
                "rounds": self.home.agreement.rounds,
                "rule_terms": self.home.rule.model_dump(),
            },
        )

    def _made(self, store: Store, write: Any) -> Digest:
        path = store.scratch_path()
        write(path)
        return store.adopt(path).digest

    def train(self, round: int) -> Update:
        updates, carries = self.state.updates, self.state.carry
        own, outgoing, carry = (
            updates.scratch_path(),
            updates.scratch_path(),
            carries.scratch_path(),
        )
        before = self.ledger.work
        trained = self.site.train(
            base=self.state.models.path(self.ledger.model),
            carry=carries.path(before.carry) if before else None,
            round=round,
            own=own,
            outgoing=outgoing,
            carry_out=carry,
        )
        stored = updates.adopt(own)
        sent = updates.adopt(outgoing) if outgoing.exists() else stored
        work = Work(
            own=stored.digest,
            outgoing=sent.digest,
            carry=carries.adopt(carry).digest,
            raw_bytes=sent.raw_bytes,
            samples=trained.samples,
            metrics=trained.metrics,
        )
        self.update = Update(self.name, Generation(0), Round(round), work.outgoing)
        manifest = Manifest("demo", self.update, 1, Digest("5c" * 32), work.raw_bytes, work.samples)
        memory = Memory(Generation(0), Round(round), announced=self.update)
        self.ledger.seal(self.update, memory, work, self.home.identity.sign_manifest(manifest))
        return self.update

    def judge(self, round: int, others: Mapping[Update, Path]) -> None:
        """Fetch, judge and decide."""
        for update, path in others.items():
            copy = self.state.updates.scratch_path()
            copy.write_bytes(path.read_bytes())
            assert self.state.updates.adopt(copy).digest == update.digest
        work = self.ledger.work
        assert work is not None
        updates = self.state.updates
        judged = self.site.judge(
            own=updates.path(work.own),
            before=self.state.models.path(self.ledger.model),
            peers=[
                Candidate(one.peer, str(updates.path(one.digest)), 120, one.digest)
                for one in others
            ],
            round=round,
            state=self.ledger.rule_state,
            carry=self.state.carry.path(work.carry),
        )
        # As they come over the pipe.
        verdicts = tuple(verdict_from_plain(verdict_to_plain(one)) for one in judged.verdicts)
        taken = {verdict.peer for verdict in verdicts if verdict.accepted}
        accepted = tuple(update for update in others if update.peer in taken)
        self.decision = Decision(Round(round), Cause.ALL, "all delivered", accepted, verdicts)
        memory = replace(self.ledger.memory, decision=self.decision)
        self.ledger.decide(self.decision, memory, judged.state)

    def merge(self, round: int) -> None:
        work = self.ledger.work
        assert work is not None
        weights = {verdict.peer: verdict.weight for verdict in self.decision.verdicts}
        updates = self.state.updates
        out = self.state.models.scratch_path()
        merged = self.site.merge(
            own=updates.path(work.own),
            accepted=[
                (
                    Candidate(one.peer, str(updates.path(one.digest)), 0, one.digest),
                    weights[one.peer],
                )
                for one in self.decision.accepted
            ],
            round=round,
            out=out,
            carry=self.state.carry.path(work.carry),
        )
        model = self.state.models.adopt(out).digest
        memory = Memory(Generation(0), Round(round + 1), announced=self.update)
        self.ledger.commit(Round(round), model, memory, merged.metrics, merged.harm)
        self.state.models.retain(self.ledger.kept_models)
        self.state.carry.retain({work.carry})

    @property
    def journal(self) -> Journal:
        return self.state.journal

    def close(self) -> None:
        self.state.close()


def graduates(
    folder: Path,
    *,
    sites: int = 3,
    rounds: int = 3,
    rule: RuleTerms | None = None,
    exchange: ExchangeTerms | None = None,
    keep_models: int = 2,
) -> list[Graduate]:
    """After the last round; whoever wants to look at the files from outside closes them first."""
    homes = lay_out(
        folder,
        site_names(sites),
        seed=SEED,
        rounds=rounds + 1,
        rule=rule,
        exchange=exchange,
        task=TASK,
    )
    learned = [Graduate(home, keep_models) for home in homes]
    for round in range(rounds):
        play(learned, round)
    return learned


def play(learned: list[Graduate], round: int) -> None:
    with _as_in_a_worker():
        _play(learned, round)


@contextmanager
def _as_in_a_worker() -> Iterator[None]:
    """Sums in another order would differ in their last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def _play(learned: list[Graduate], round: int) -> None:
    sent = {one.train(round): one.state.updates.path(one.update.digest) for one in learned}
    for one in learned:
        others = {update: path for update, path in sent.items() if update.peer != one.name}
        one.judge(round, others)
    for one in learned:
        one.merge(round)
