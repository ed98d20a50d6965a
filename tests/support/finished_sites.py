"""Sites that have completed some rounds: real models and journals, without running nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lightyear_node import __version__
from lightyear_node.config.federation import ExchangeConfig, RuleConfig
from lightyear_node.config.node import TaskConfig
from lightyear_node.lab.federation import PEERS_NAME, SiteHome, lay_out, site_names
from lightyear_node.node.home import Home, load_home
from lightyear_node.protocol.durable_state import Decision, DurableState
from lightyear_node.protocol.parameters import Cause
from lightyear_node.storage.blobs import BlobStore
from lightyear_node.storage.journal import Journal
from lightyear_node.storage.journal_memory import TrainingResult
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.storage.state_directory import StateDirectory
from lightyear_node.types import Digest, Generation, Manifest, Round, Update
from lightyear_node.worker.job_types import CandidateFile, verdict_from_plain, verdict_to_plain
from lightyear_node.worker.site import LocalSite
from lightyear_node.worker.task import load_task

TASK = TaskConfig(entry="tests.support.tiny_task:build")
SEED = 7


class FinishedSite:
    """One site: runs the worker's code in this process, and records what a node would."""

    def __init__(self, at: SiteHome, keep_models: int) -> None:
        self.at, self.name = at, at.name
        self.home: Home = load_home(
            at.directory, at.directory / PEERS_NAME, environment={}, flags={}, now=datetime.now(UTC)
        )
        opening = self.home.opening()
        names = ("site_name", "site_index", "site_count", "seed")
        about = (at.name, opening["sites"].index(at.name), len(opening["sites"]), SEED)
        context = dict(zip(names, about, strict=True))
        self.site = LocalSite(
            load_task(TASK.name, {}, context),
            name=at.name,
            seed=SEED,
            rule=self.home.rule,
            rounds=self.home.federation.rounds,
            device="cpu",
            exchange=self.home.federation.exchange,
        )
        self.state = StateDirectory(at.state_dir)
        self.round_journal = RoundJournal(
            self.state.journal,
            wall_ns=lambda: 1_700_000_000_000_000_000 + self.state.journal.length * 10**9,
            sign=lambda seq, hash: self.home.identity.sign_head("demo", seq, hash),
            models_kept=keep_models,
        )
        initial = self._stored(self.state.models, lambda path: self.site.write_initial(path))
        self.round_journal.start(
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
                "rounds": self.home.federation.rounds,
                "rule_terms": self.home.rule.model_dump(),
            },
        )

    def _stored(self, store: BlobStore, write: Any) -> Digest:
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
        before = self.round_journal.work
        trained = self.site.train(
            base=self.state.models.path(self.round_journal.model),
            carry=carries.path(before.carry) if before else None,
            round=round,
            own=own,
            outgoing=outgoing,
            carry_out=carry,
        )
        stored = updates.adopt(own)
        sent = updates.adopt(outgoing) if outgoing.exists() else stored
        work = TrainingResult(
            own=stored.digest,
            outgoing=sent.digest,
            carry=carries.adopt(carry).digest,
            raw_bytes=sent.raw_bytes,
            samples=trained.samples,
            metrics=trained.metrics,
        )
        self.update = Update(self.name, Generation(0), Round(round), work.outgoing)
        manifest = Manifest("demo", self.update, 1, Digest("5c" * 32), work.raw_bytes, work.samples)
        memory = DurableState(Generation(0), Round(round), announced=self.update)
        self.round_journal.seal(
            self.update, memory, work, self.home.identity.sign_manifest(manifest)
        )
        return self.update

    def judge(self, round: int, others: Mapping[Update, Path]) -> None:
        """Copy the others' updates, judge them and record the decision."""
        for update, path in others.items():
            copy = self.state.updates.scratch_path()
            copy.write_bytes(path.read_bytes())
            assert self.state.updates.adopt(copy).digest == update.digest
        work = self.round_journal.work
        assert work is not None
        updates = self.state.updates
        judged = self.site.judge(
            own=updates.path(work.own),
            before=self.state.models.path(self.round_journal.model),
            peers=[
                CandidateFile(one.peer, str(updates.path(one.digest)), 120, one.digest)
                for one in others
            ],
            round=round,
            state=self.round_journal.rule_state,
            carry=self.state.carry.path(work.carry),
        )
        # Converted as between worker and node.
        verdicts = tuple(verdict_from_plain(verdict_to_plain(one)) for one in judged.verdicts)
        accepted_peers = {verdict.peer for verdict in verdicts if verdict.accepted}
        accepted = tuple(update for update in others if update.peer in accepted_peers)
        self.decision = Decision(Round(round), Cause.ALL, "all delivered", accepted, verdicts)
        memory = replace(self.round_journal.memory, decision=self.decision)
        self.round_journal.decide(self.decision, memory, judged.state)

    def merge(self, round: int) -> None:
        work = self.round_journal.work
        assert work is not None
        weights = {verdict.peer: verdict.weight for verdict in self.decision.verdicts}
        updates = self.state.updates
        out = self.state.models.scratch_path()
        merged = self.site.merge(
            own=updates.path(work.own),
            accepted=[
                (
                    CandidateFile(one.peer, str(updates.path(one.digest)), 0, one.digest),
                    weights[one.peer],
                )
                for one in self.decision.accepted
            ],
            round=round,
            out=out,
            carry=self.state.carry.path(work.carry),
            worth=self.round_journal.worth,
        )
        model = self.state.models.adopt(out).digest
        memory = DurableState(Generation(0), Round(round + 1), announced=self.update)
        measured = merged.metrics, merged.harm
        self.round_journal.commit(Round(round), model, memory, *measured, worth=merged.worth)
        self.state.models.retain(self.round_journal.kept_models)
        self.state.carry.retain({work.carry})

    @property
    def journal(self) -> Journal:
        return self.state.journal

    def close(self) -> None:
        self.state.close()


def make_finished_sites(
    folder: Path,
    *,
    sites: int = 3,
    rounds: int = 3,
    rule: RuleConfig | None = None,
    exchange: ExchangeConfig | None = None,
    keep_models: int = 2,
) -> list[FinishedSite]:
    """Sites after `rounds` rounds; close them before other processes open their files."""
    homes = lay_out(
        folder,
        site_names(sites),
        seed=SEED,
        rounds=rounds + 1,
        rule=rule,
        exchange=exchange,
        task=TASK,
    )
    finished = [FinishedSite(home, keep_models) for home in homes]
    for round in range(rounds):
        run_round(finished, round)
    return finished


def run_round(sites: list[FinishedSite], round: int) -> None:
    with _worker_arithmetic():
        _run_round(sites, round)


@contextmanager
def _worker_arithmetic() -> Iterator[None]:
    """Set torch up as in a worker: other sums would differ in their last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def _run_round(sites: list[FinishedSite], round: int) -> None:
    sent = {one.train(round): one.state.updates.path(one.update.digest) for one in sites}
    for one in sites:
        others = {update: path for update, path in sent.items() if update.peer != one.name}
        one.judge(round, others)
    for one in sites:
        one.merge(round)
