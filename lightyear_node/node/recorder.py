"""Records the barrier's decisions: first in the journal, then in log, metrics and status.

A decision that cannot be written raises before anything else has changed, so that it can be
repeated when there is space.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from lightyear_node.identity.keys import signing_keys
from lightyear_node.node.active_config import ActiveConfig
from lightyear_node.node.config_changes import ConfigChanges
from lightyear_node.node.inbox import Proofs
from lightyear_node.node.peer_memory import PeerMemory
from lightyear_node.node.retention import Retention
from lightyear_node.node.round_jobs import RoundJobs
from lightyear_node.observe.observer import Observer
from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.protocol.events import Accuse, Commit, Decide, Note, Seal
from lightyear_node.protocol.manifests import ManifestStore
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.types import Digest, PeerName


@dataclass(eq=False, repr=False)
class Recorder:
    _barrier: Barrier
    _journal: RoundJournal
    _manifests: ManifestStore
    _peer_memory: PeerMemory
    _retention: Retention
    _round_jobs: RoundJobs
    _active: ActiveConfig
    _observer: Observer

    # Proofs, which the barrier refers to.

    def keep(self, proofs: Proofs) -> bool:
        """Keep the manifests that came with an event; whether it is time to `prune`."""
        return self._manifests.keep(proofs)

    def prune(self) -> None:
        """Drop the manifests that the barrier no longer refers to."""
        self._manifests.retain(self._barrier.referenced())

    # The barrier's persistence points.

    def seal(self, seal: Seal) -> None:
        result = self._round_jobs.results.training
        assert result is not None
        manifest = self._manifests.own_manifest(
            seal.update,
            lamport=self._journal.length + 1,
            raw_bytes=result.raw_bytes,
            samples=result.samples,
            base=self._retention.base(),
        )
        signed = self._active.home.identity.sign_manifest(manifest)
        self._journal.seal(seal.update, seal.memory, result, signed)

    def decide(self, decide: Decide) -> None:
        decision = decide.decision
        self._journal.decide(decision, decide.memory, self._round_jobs.results.rule_state)
        self._observer.decided(decision.round, decision.why, decision.verdicts)

    def commit(self, commit: Commit) -> None:
        results = self._round_jobs.results
        measured = results.metrics, results.harm
        journal = self._journal
        journal.commit(
            commit.round, commit.model, commit.memory, *measured, results.left_out, results.worth
        )
        verdicts = journal.rounds()[-1]["verdicts"]
        self._observer.committed(commit.round, commit.model, *measured, verdicts, results.left_out)
        self._observer.compared(commit.round, results.worth)
        self._retention.tidy(self._barrier.kept(), self._active.home.others)

    def note(self, note: Note) -> None:
        memory = note.memory
        self._forget_replaced_journals(memory)
        self._journal.note(note.kind, note.about, memory)
        self._observer.noted(note.kind, note.about, memory.paused, memory.quarantined)

    def accuse(self, accuse: Accuse) -> None:
        proof = self._manifests.proof(accuse.first, accuse.second)
        if proof is not None:  # the barrier accuses only where both manifests are kept
            self._journal.accuse(proof, accuse.memory)
            self._observer.peers.quarantined(accuse.first.peer, accuse.first.round)

    def _forget_replaced_journals(self, memory: DurableState) -> None:
        """A peer that lost its memory began a new journal: the head that we hold is void."""
        before = self._journal.memory.generations
        for peer, (generation, _) in memory.generations.items():
            if peer in before and generation > before[peer][0]:
                self._peer_memory.forget(peer)

    # Everything else.

    def finished(self) -> None:
        self._observer.finished(self._active.parameters.rounds, self._journal.model)

    def config_changed(self, changes: ConfigChanges, config_digest: Digest) -> None:
        self._journal.settings(
            changes.to_plain(),
            certificate=self._active.home.identity.fingerprint,
            agreement=config_digest,
        )

    def members_changed(self, removed: Collection[PeerName]) -> None:
        """Trust the certificates in force, and forget what was kept of removed peers."""
        self._manifests.set_keys(signing_keys(self._active.home.certificates))
        for peer in removed:
            self._peer_memory.forget(peer)
