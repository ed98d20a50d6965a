"""The long jobs of a round: training, judging, merging, fetching.  Each ends as an event.

They run beside the event loop, on what the barrier's commands name, and contain no policy.  A job
that writes a large file waits for disk space first.  While training or merging fails, the node
serves its peers and tries again, less and less often: an operator can correct the task meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from lightyear_node.errors import ConfigError, Shortage, WorkerError
from lightyear_node.node.downloads import Downloads
from lightyear_node.node.inbox import Inbox
from lightyear_node.node.peer_connections import Spawn
from lightyear_node.node.retention import Retention
from lightyear_node.node.worker_jobs import WorkerJobs
from lightyear_node.observe.observer import Observer
from lightyear_node.protocol.durable_state import Decision
from lightyear_node.protocol.events import Fetch, Judge, Judged, Merge, Merged, Train, Trained
from lightyear_node.storage.disk_space import DiskSpace
from lightyear_node.storage.journal_memory import TrainingResult
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.types import Harm, PeerName, Round, Verdict, Worth

Job = Train | Fetch | Judge | Merge
Result = TypeVar("Result")

PAUSE_S = 10.0
PAUSE_S_MAX = 600.0
"""Pauses between attempts of a job that keeps failing; each is twice as long as the one before."""


@dataclass
class JobResults:
    """What the jobs of a round have produced and the journal has not recorded yet."""

    training: TrainingResult | None
    rule_state: Mapping[str, Any]
    metrics: dict[str, float] = field(default_factory=dict)
    harm: Harm | None = None
    worth: Worth | None = None
    left_out: tuple[PeerName, ...] = ()


@dataclass(eq=False, repr=False)
class RoundJobs:
    _worker_jobs: WorkerJobs
    _downloads: Downloads
    _journal: RoundJournal
    _retention: Retention
    _disk_space: DiskSpace
    _observer: Observer
    _inbox: Inbox
    _spawn: Spawn

    def __post_init__(self) -> None:
        self.results = JobResults(self._journal.work, self._journal.rule_state)

    def start(self, job: Job) -> None:
        """Start a job in the background."""
        match job:
            case Train(round):
                self._spawn(self.train(round))
            case Fetch(update):
                self._spawn(self._downloads.fetch(update))
            case Judge():
                self._spawn(self.judge(job))
            case Merge(decision):
                self._spawn(self.merge(decision))

    async def train(self, round: Round) -> None:
        space, journal = self._disk_space, self._journal
        carry = journal.work.carry if journal.work else None
        train = partial(self._worker_jobs.train, round, journal.model, carry)
        result = await self._until_it_works(round, "training", train, space.needs.training)
        self.results.training = result
        with contextlib.suppress(Shortage):  # the next training measures it again
            space.needs = replace(space.needs, carry=self._retention.largest_carry())
        self._observer.trained(round, result.metrics)
        self._inbox.put(Trained(result.outgoing))

    async def judge(self, judge: Judge) -> None:
        training = self.results.training
        assert training is not None
        self._retention.use(judge.updates)
        lost = await self._downloads.lost(judge.updates)
        here = [update for update in judge.updates if update.peer not in lost]
        peers = [
            (update.peer, update.digest, self._downloads.samples_of(update)) for update in here
        ]
        began = time.monotonic()
        journal = self._journal
        try:
            judging = partial(
                self._worker_jobs.judge,
                *(judge.round, training, journal.model, peers, journal.rule_state),
            )
            verdicts, rule_state = await self._disk_space.retry("judging", judging)
            self.results.rule_state = rule_state
        except WorkerError as problem:
            # Without verdicts no peer is merged, and the round continues with our own model.
            text = "round %d: no peer could be judged: %s"
            self._observer.log.warning(text, judge.round, problem, extra={"event": "judging"})
            verdicts = ()
        self._observer.scored(time.monotonic() - began)
        missing = [Verdict(peer, False, reason) for peer, reason in lost.items()]
        self._inbox.put(Judged(judge.round, (*verdicts, *missing)))

    async def merge(self, decision: Decision) -> None:
        """Merge the accepted updates, except those whose files were lost since the decision.

        The decision is durable and stands; our own model takes the share of every update that is
        left out, as with harmful ones, and the round's record names the peers.
        """
        training = self.results.training
        assert training is not None
        lost = await self._downloads.lost(decision.accepted)
        weights = {verdict.peer: verdict.weight for verdict in decision.verdicts}
        here = [update for update in decision.accepted if update.peer not in lost]
        accepted = [(u.peer, u.digest, weights[u.peer]) for u in here]
        worth = self._journal.worth
        merge = partial(self._worker_jobs.merge, decision.round, training, accepted, worth)
        needed = self._disk_space.needs.model
        merged = await self._until_it_works(decision.round, "merging", merge, needed)
        self.results.metrics, self.results.harm = dict(merged.metrics), merged.harm
        self.results.worth = merged.worth
        self.results.left_out = tuple(sorted({*lost, *merged.left_out}))
        self._inbox.put(Merged(decision.round, merged.model))

    async def _until_it_works(
        self, round: Round, what: str, job: Callable[[], Awaitable[Result]], needed: int
    ) -> Result:
        pause_s = PAUSE_S
        while True:
            try:
                result = await self._disk_space.retry(what, job, needed)
            except (WorkerError, ConfigError) as problem:
                self._observer.job_failed(round, what, problem, pause_s)
            else:
                self._observer.failure = None
                return result
            # The next attempt builds the task again, from the files as they are then.
            await self._worker_jobs.stop()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
