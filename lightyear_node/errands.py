"""What takes a while: training, fetching, judging, merging.  Each ends as an event.

Runs beside the driver's loop, on what the driver's commands name; decides nothing.  Whatever writes
a large file waits for room on the disk first.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightyear_node.archive import Archive
from lightyear_node.barrier import (
    Answered,
    Barrier,
    Decision,
    Event,
    Fetched,
    FetchFailed,
    Judge,
    Judged,
    Merged,
    Trained,
)
from lightyear_node.errors import DiskFull, PeerError, PeerMisbehaved, WorkerError
from lightyear_node.home import State
from lightyear_node.learner import Learner
from lightyear_node.ledger import Ledger, Work
from lightyear_node.links import Links
from lightyear_node.observe.metrics import RECEIVED
from lightyear_node.observe.observer import Observer
from lightyear_node.records import CHUNK_BYTES, Harm, PeerName, Reason, Round, Update
from lightyear_node.shelf import Shelf
from lightyear_node.space import Space
from lightyear_node.transport.codec import Grid

Tell = Callable[[Event], None]


@dataclass
class Errands:
    """What they have brought is kept until it is recorded: `work`, `rule_state`, `metrics`."""

    learner: Learner
    ledger: Ledger
    state: State
    space: Space
    shelf: Shelf
    archive: Archive
    links: Links
    barrier: Barrier
    observer: Observer
    grid: Grid
    done: Tell
    """Takes every event that ends an errand."""
    heard: Tell
    """Takes signs of life, as many as there is room for."""

    def __post_init__(self) -> None:
        self.work: Work | None = self.ledger.work
        self.rule_state: Mapping[str, Any] = self.ledger.rule_state
        self.metrics: dict[str, float] = {}
        self.harm: Harm | None = None

    async def train(self, round: Round) -> None:
        carry = self.ledger.work.carry if self.ledger.work else None
        train = partial(self.learner.train, round, self.ledger.model, carry)
        self.work = await self.space.through("training", train, self.space.needs.training)
        self.space.needs = replace(self.space.needs, carry=self.state.carry.largest())
        self.observer.trained(round, self.work.metrics)
        self.done(Trained(self.work.outgoing))

    async def fetch(self, update: Update) -> None:
        if self.state.updates.has(update.digest):
            self.shelf.received(update, self.barrier.kept())
            self.done(Fetched(update))
            return
        if self.archive.find(update) is None:
            # Pushed out by newer ones, of which the barrier is about to hear.
            self.done(FetchFailed(update, Reason.STALE_ROUND, retriable=True))
            return
        try:
            await self._bring(update)
        except DiskFull as problem:
            self.observer.transfer_failed(update.peer, Reason.DISK_FULL, str(problem))
            self.done(FetchFailed(update, Reason.DISK_FULL, retriable=True))
        except PeerError as problem:
            self.observer.transfer_failed(update.peer, problem.reason, str(problem))
            # Bytes that came whole and were wrong will not be right another time.
            retriable = not isinstance(problem, PeerMisbehaved)
            self.done(FetchFailed(update, problem.reason, retriable))
        else:
            self.done(Fetched(update))

    async def judge(self, judge: Judge) -> None:
        assert self.work is not None
        self.shelf.use(judge.updates)
        for update in judge.updates:
            await self._bring_back(update)
        here = [update for update in judge.updates if self.state.updates.has(update.digest)]
        peers = [(update.peer, update.digest, self._samples(update)) for update in here]
        began = time.monotonic()
        try:
            verdicts, self.rule_state = await self.learner.judge(
                judge.round, self.work, self.ledger.model, peers, self.ledger.rule_state
            )
        except WorkerError as problem:
            # Without a verdict nobody is merged, and the round goes on with our own model.
            text = "round %d: no peer could be judged: %s"
            self.observer.log.warning(text, judge.round, problem, extra={"event": "judging"})
            verdicts = ()
        self.observer.scored(time.monotonic() - began)
        self.done(Judged(judge.round, verdicts))

    async def merge(self, decision: Decision) -> None:
        assert self.work is not None
        weights = {verdict.peer: verdict.weight for verdict in decision.verdicts}
        accepted = [(u.peer, u.digest, weights[u.peer]) for u in decision.accepted]
        merge = partial(self.learner.merge, decision.round, self.work, accepted)
        model, metrics, self.harm = await self.space.through(
            "merging", merge, self.space.needs.model
        )
        self.metrics = dict(metrics)
        self.done(Merged(decision.round, model))

    async def _bring(self, update: Update) -> None:
        """Bring a peer's update here, if there is room for it."""
        updates = self.state.updates
        async with self.links.fetch_slots:
            client = self.links.clients.get(update.peer)
            signed = self.archive.find(update)
            if client is None or signed is None:
                raise PeerError(update.peer, Reason.BLOCKED, "no longer in peers.yaml")
            here = updates.partial_chunks(update.digest, signed.manifest.raw_bytes) * CHUNK_BYTES
            try:
                with self.space.coming(max(0, signed.manifest.raw_bytes - here)):
                    transfer = await client.fetch(
                        signed.manifest,
                        updates,
                        self.grid,
                        partial(self._arriving, update.peer),
                        partial(self.observer.resumed, update.peer),
                    )
            finally:
                self.observer.under_way.arrived(update.peer)
        self.observer.transferred(update.peer, RECEIVED, transfer)
        self.shelf.received(update, self.barrier.kept())

    async def _bring_back(self, update: Update) -> None:
        """Of what is to be judged, one that a full disk has cost us since it came."""
        if self.state.updates.has(update.digest):
            return
        with contextlib.suppress(PeerError):  # it has gone on meanwhile, and is not judged
            await self.space.through("a peer's update", partial(self._bring, update))

    def _arriving(self, peer: PeerName, done: int, total: int) -> None:
        """A chunk has come.  On a narrow line the answer to a heartbeat may wait behind it."""
        self.heard(Answered(peer))
        self.observer.sending(peer)
        self.observer.under_way.arriving(peer, done, total)

    def _samples(self, update: Update) -> int:
        signed = self.archive.find(update)
        return signed.manifest.samples if signed else 0
