"""Construction of a node, in two phases; each is a frozen record of parts that exist.

`Prepared` needs the home directory only.  `Rounds` also needs the model, which the worker builds
meanwhile; the first durable record is written between them.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lightyear_node import __version__
from lightyear_node.audit.self_check import SelfCheck, check_journal
from lightyear_node.errors import JournalCorrupt
from lightyear_node.identity.keys import signing_keys
from lightyear_node.integrations.tracking import Tracking
from lightyear_node.node.active_config import ActiveConfig
from lightyear_node.node.config_reload import ConfigReload
from lightyear_node.node.downloads import Downloads
from lightyear_node.node.event_loop import EventLoop
from lightyear_node.node.gossip import Gossip, LocalFacts
from lightyear_node.node.heartbeat import Heartbeat, OwnState
from lightyear_node.node.home import Home
from lightyear_node.node.inbox import Inbox
from lightyear_node.node.journal_witness import JournalWitness
from lightyear_node.node.local_api import LocalApi
from lightyear_node.node.operator_commands import OperatorCommands
from lightyear_node.node.peer_connections import PeerConnections, Spawn
from lightyear_node.node.peer_memory import PeerMemory
from lightyear_node.node.recorder import Recorder
from lightyear_node.node.retention import Retention, drop_leftovers
from lightyear_node.node.round_jobs import RoundJobs
from lightyear_node.node.stop_request import StopRequest
from lightyear_node.node.tracking import start_tracking
from lightyear_node.node.worker_activity import WorkerActivity
from lightyear_node.node.worker_jobs import OpenedModel, WorkerJobs
from lightyear_node.node.worker_process import WORKER_PROGRAM, WorkerProcess
from lightyear_node.observe.metrics import Metrics
from lightyear_node.observe.observer import Observer
from lightyear_node.protocol.manifests import ManifestStore
from lightyear_node.protocol.parameters import Phase
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.storage.disk_space import DiskSpace, SpaceNeeds
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.storage.state_directory import StateDirectory
from lightyear_node.transport.codec import ChunkGrid


@dataclass(frozen=True, slots=True)
class Prepared:
    """Parts that need no model: with them the node answers operators while it starts."""

    active: ActiveConfig
    state: StateDirectory
    self_check: SelfCheck
    observer: Observer
    activity: WorkerActivity
    worker: WorkerProcess
    worker_jobs: WorkerJobs
    disk_space: DiskSpace
    local_api: LocalApi
    inbox: Inbox
    stop: StopRequest
    recovered: bool
    """The operator states that the state directory is from a backup."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Parts that need the model and a journal that has begun."""

    round_journal: RoundJournal
    barrier: Barrier
    retention: Retention
    connections: PeerConnections
    own_state: OwnState
    event_loop: EventLoop
    config_reload: ConfigReload
    operator: OperatorCommands
    tracking: Tracking

    def make_room(self, enough: Callable[[], bool], for_ourselves: bool) -> None:
        """Delete what the rounds can do without, until there is enough disk space."""
        self.connections.shed()
        kept = self.barrier.kept()
        self.retention.make_room(kept, enough, for_ourselves=for_ourselves)


def prepare(
    home: Home,
    log: logging.Logger,
    *,
    exit_when_done: bool = False,
    recovered: bool = False,
    worker_program: Sequence[str] = WORKER_PROGRAM,
) -> Prepared:
    """Open the state directory; raises JournalCorrupt where the journal does not verify."""
    state, self_check = _open_state(home, recovered)
    parameters = home.parameters()
    active = ActiveConfig(home, parameters)
    metrics = Metrics(
        home.others,
        [*Phase, "starting"],
        __version__,
        home.federation.rounds,
        quality=home.config.metrics.quality,
    )
    observer = Observer(metrics, log, home.others, home.rule.threshold, parameters.heartbeat_s)
    activity = WorkerActivity(observer, log_output=home.config.log.task_output)
    worker = WorkerProcess(
        home.opening(),
        silence_s=home.config.worker.silence,
        on_progress=activity.progressed,
        on_output=activity.printed,
        full_errors=home.config.log.task_errors == "full",
        memory_max=home.config.worker.memory_max,
        program=worker_program,
    )
    clamped = partial(log.warning, "%s", extra={"event": "clamped"})
    disk_space = DiskSpace(state.directory, home.config.disk, observer)
    disk_space.release = lambda enough, for_ourselves: drop_leftovers(state)
    metrics.certificate_expiry.set(home.identity.certificate.expires.timestamp())
    metrics.worker_up.set_function(lambda: worker.pid is not None)
    metrics.disk_free.set_function(disk_space.free)
    return Prepared(
        active=active,
        state=state,
        self_check=self_check,
        observer=observer,
        activity=activity,
        worker=worker,
        worker_jobs=WorkerJobs(worker, state, observer.worker_restarted, clamped),
        disk_space=disk_space,
        local_api=LocalApi(active, state, observer, worker, disk_space),
        inbox=Inbox(),
        stop=StopRequest(when_finished=exit_when_done),
        recovered=recovered,
    )


def open_rounds(parts: Prepared, model: OpenedModel, spawn: Spawn) -> Rounds:
    """Record the start, then make what runs the rounds; may be repeated on a full disk."""
    home = parts.active.home
    facts = _facts(home, model)
    manifests = ManifestStore(
        signing_keys(home.certificates),
        federation=facts.federation,
        schema=facts.schema,
        raw_bytes=facts.grid.raw_bytes,
        dtype=facts.dtype,
    )
    round_journal = _journal(parts, manifests)
    manifests.keep(round_journal.seen)
    parts.disk_space.set_needs(
        SpaceNeeds(
            model=model.initial.raw_bytes,
            update=model.wire_raw_bytes,
            carry=parts.state.carry.largest(),
            peers=len(home.others),
            models_kept=home.config.keep.models,
        )
    )
    _record_start(round_journal, home, model, facts, parts.recovered)
    parts.observer.restore(round_journal.rounds())
    memory = round_journal.memory
    parts.observer.set_restrictions(memory.paused, memory.quarantined)
    return _connect(parts, facts, manifests, round_journal, spawn)


def _connect(
    parts: Prepared,
    facts: LocalFacts,
    manifests: ManifestStore,
    round_journal: RoundJournal,
    spawn: Spawn,
) -> Rounds:
    active, state, observer, inbox = parts.active, parts.state, parts.observer, parts.inbox
    home, disk_space = active.home, parts.disk_space
    delta = home.federation.exchange.delta
    retention = Retention(state, round_journal, facts.grid, delta=delta)
    barrier = Barrier(home.us, active.parameters, round_journal.memory, provable=manifests.holds)
    own_state = OwnState(barrier, round_journal, active, parts.activity)
    peer_memory = _peer_memory(parts, manifests, round_journal)
    gossip = Gossip(
        facts,
        manifests,
        observer,
        peer_memory,
        state=own_state.current,
        emit=inbox.hear,
        offer=retention.offer,
        wall_ns=time.time_ns,
    )
    faulty_max = active.parameters.faulty_max
    connections = PeerConnections(home, gossip, state.directory, faulty_max, spawn)
    downloads = Downloads(
        *(barrier, manifests, retention, connections, disk_space, observer, inbox, facts.grid)
    )
    jobs = (parts.worker_jobs, downloads, round_journal, retention, disk_space, observer)
    round_jobs = RoundJobs(*jobs, inbox, spawn)
    kept = (manifests, peer_memory, retention, round_jobs, active, observer)
    recorder = Recorder(barrier, round_journal, *kept)
    heartbeat = Heartbeat(gossip, connections, parts.local_api, active, spawn)
    return Rounds(
        round_journal=round_journal,
        barrier=barrier,
        retention=retention,
        connections=connections,
        own_state=own_state,
        event_loop=EventLoop(
            *(barrier, inbox, own_state, heartbeat, recorder, round_jobs, disk_space, observer)
        ),
        config_reload=ConfigReload(
            *(active, recorder, gossip, connections, disk_space, observer, inbox, spawn)
        ),
        operator=OperatorCommands(barrier, round_journal, inbox.put, parts.stop.by_operator),
        tracking=start_tracking(home, state.directory, round_journal, observer.log),
    )


def _facts(home: Home, model: OpenedModel) -> LocalFacts:
    return LocalFacts(
        us=home.us,
        federation=home.federation.federation,
        agreement=home.federation.digest(),
        schema=model.schema,
        initial_model=model.initial.digest,
        grid=ChunkGrid(model.header),
        boot_id=str(uuid.uuid4()),
        dtype=home.federation.exchange.dtype,
        clauses=home.federation.clauses(),
    )


def _journal(parts: Prepared, manifests: ManifestStore) -> RoundJournal:
    return RoundJournal(
        parts.state.journal,
        wall_ns=time.time_ns,
        find=manifests.find,
        on_record=parts.observer.metrics.records.inc,
        sign=parts.active.sign_head,
        models_kept=parts.active.home.config.keep.models,
    )


def _peer_memory(
    parts: Prepared, manifests: ManifestStore, round_journal: RoundJournal
) -> PeerMemory:
    home = parts.active.home
    witness = JournalWitness(
        round_journal,
        us=home.us,
        federation=home.federation.federation,
        signing_key=home.identity.certificate.signing_key,
    )
    share = home.config.share_verdicts
    return PeerMemory(round_journal, witness, manifests, parts.observer, share)


def _record_start(
    round_journal: RoundJournal,
    home: Home,
    model: OpenedModel,
    facts: LocalFacts,
    recovered: bool,
) -> None:
    round_journal.start(
        schema=model.home_schema,
        dtype=facts.dtype,
        initial_model=facts.initial_model,
        rule=home.rule.name,
        about={
            "site": home.us,
            "federation": facts.federation,
            "signing_key": home.identity.certificate.signing_key.hex(),
            "boot_id": facts.boot_id,
            "version": __version__,
            "agreement": facts.agreement,
            "initial_model": facts.initial_model,
            "task": home.config.task.name,
            "seed": home.federation.seed,
            "sites": sorted(home.certificates),
            "rounds": home.federation.rounds,
            "rule_terms": home.rule.model_dump(),
        },
        recovered=recovered,
    )


def _open_state(home: Home, recovered: bool) -> tuple[StateDirectory, SelfCheck]:
    state = StateDirectory(home.directory / home.config.state_dir, recovered=recovered)
    with contextlib.ExitStack() as undo:
        undo.callback(state.close)
        found = SelfCheck()
        if state.journal.length:
            found = check_journal(state.directory, own_signing_keys(home))
        if found.damage is not None:
            raise JournalCorrupt(
                found.damage,
                hint="docs/runbooks/LightyearAuditChainBroken.md says what to do first",
            )
        undo.pop_all()
    return state, found


def own_signing_keys(home: Home) -> list[bytes]:
    """The signing keys of every certificate of this site."""
    return [one.signing_key for one in home.certificates[home.us]]
