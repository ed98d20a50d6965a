"""An honest site: a disk and a process, either of which may be lost.

Replaces the product's event loop: executes the barrier's commands, feeds it the results, and sends
only what is durable.  It can be killed before and after every persistence point.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lightyear_node.errors import PeerError, PeerRefusedUs, PeerUnreachable
from lightyear_node.node.gossip import LocalState
from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.protocol.events import (
    Accuse,
    Alarm,
    Announce,
    Command,
    Commit,
    Decide,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    Finish,
    Greet,
    Judge,
    Judged,
    Merge,
    Merged,
    Note,
    Reconfigured,
    Seal,
    Sealed,
    Tick,
    Train,
    Trained,
)
from lightyear_node.protocol.parameters import Parameters
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.transport.limits import CALL_S, EVIDENCE_MAX
from lightyear_node.types import (
    Generation,
    PeerName,
    Reason,
    Round,
    SignedManifest,
    Update,
    Verdict,
)
from tests.sim.disk import Disk
from tests.sim.invariant_checker import InvariantBroken
from tests.sim.real_gossip import Answer, Message, SimulatedGossip, digest_of, sign
from tests.sim.world import Action, Reply, World


class Crash(Exception):
    """The site is killed while it executes a command."""


@dataclass(frozen=True)
class ExternalEvent:
    """Something done to a site from outside, for the transcript."""

    text: str


class Site:
    def __init__(self, name: PeerName, world: World) -> None:
        self.name = name
        self.world = world
        self.checker = world.checker
        self.others = [peer for peer in world.names if peer != name]
        members = frozenset(self.others) - {world.conditions.latecomer}
        self.parameters = replace(world.conditions.parameters, peers=members)
        self.barrier: Barrier | None = None
        self.disk = world.new_disk()
        self.durable = DurableState(Generation(0), Round(0), recovering=True)
        """The state that a restart would restore."""
        self.paused = False
        self.longest_wait_s = 0.0
        self._backup: Disk | None = None
        self._boots = 0
        self._removed = False
        self._deferred: list[Action] = []
        self._sealed_at: float | None = None
        self._training_since: float | None = None
        self._seen: tuple[Update, ...] = ()
        self._inbox: list[tuple[Event, tuple[SignedManifest, ...]]] = []
        self._contacting: set[PeerName] = set()
        self.gossip = self._new_gossip()

    # Process and disk.

    def boot(self) -> None:
        if self.barrier is not None or self._removed:
            return
        self.world.record(self.name, ExternalEvent("starts"))
        memory = self.disk.read() or DurableState(Generation(0), Round(0), recovering=True)
        self.gossip = self._new_gossip()
        self.barrier = Barrier(
            self.name, self.parameters, memory, provable=self.gossip.manifests.holds
        )
        self.checker.boots(self.name, self.barrier, self.parameters)
        self._schedule(self.world.conditions.tick_s, self._tick)
        self._run_or_crash(partial(self._start, memory))

    def _new_gossip(self) -> SimulatedGossip:
        boot_id = f"{self.name}-{self._boots}"
        known = self.disk.seen
        return SimulatedGossip(
            self.name, self.parameters.peers, known, boot_id, self._local_state, self._enqueue
        )

    def _start(self, memory: DurableState) -> None:
        assert self.barrier is not None
        self._persist("P0", "start", memory)
        self._execute_all(self.barrier.start(self.world.now, self.world.wall_s()))

    def kill(self) -> None:
        """Kill the process; only the disk remains."""
        self.barrier = None
        self.paused = False
        self._sealed_at = self._training_since = None
        self._deferred.clear()
        self._inbox.clear()
        self._contacting.clear()
        self._boots += 1

    def crash(self) -> None:
        if self.barrier is None:
            return
        world = self.world
        self.kill()
        world.counts["crashes"] += 1
        world.record(self.name, ExternalEvent("is killed"))
        if world.chance(world.conditions.lost_disk):
            self.lose_disk()
        elif world.chance(world.conditions.rolled_back):
            self.restore()
        world.after(world.between(world.conditions.restart_s), self.boot)

    def lose_disk(self) -> None:
        """Replace the disk by an empty one; the keys remain."""
        assert self.barrier is None
        self.disk = self.world.new_disk()
        self.checker.loses_disk(self.name)
        self.world.counts["lost disks"] += 1
        self.world.record(self.name, ExternalEvent("loses its disk"))

    def back_up(self) -> None:
        self._backup = self.disk.copy()
        self.checker.backs_up(self.name)

    def restore(self) -> None:
        assert self.barrier is None
        if self._backup is None:
            return
        self.disk = self._backup.copy()
        self.checker.restores(self.name)
        self.world.counts["disks rolled back"] += 1
        self.world.record(self.name, ExternalEvent("is restored from a backup"))

    def start_recovered(self) -> None:
        """Restart with `--recovered`, which declares that the disk is from a backup."""
        self.kill()
        memory = self.disk.read()
        if memory is not None:
            self.disk.write("recovered", replace(memory, recovering=True))
            self.checker.distrusts_memory(self.name)
        self.world.record(self.name, ExternalEvent("is restarted as recovered"))
        self.boot()

    def remove_for_good(self) -> None:
        """Kill the site; it does not restart."""
        self.kill()
        self._removed = True

    def pause(self) -> None:
        self.paused = self.barrier is not None

    def resume(self) -> None:
        self.paused = False
        deferred, self._deferred = self._deferred, []
        for action in deferred:
            action()

    # Inputs.

    def handle(self, event: Event) -> None:
        self._when_awake(lambda: self._handle(event, ()))

    def reconfigure(self, parameters: Parameters) -> None:
        """Apply another peers.yaml; a site that is down reads it when it starts."""
        self.parameters = parameters
        self.gossip.reconfigure(parameters.peers)
        self.handle(Reconfigured(parameters))

    def receive_call(self, by: PeerName, message: Message, reply: Reply) -> None:
        if by in self.parameters.peers:
            self._when_awake(lambda: self._answer(by, message, reply))

    def serve(self, update: Update) -> Event:
        if self.barrier is None or self.paused or update not in self.disk.served:
            return FetchFailed(update, Reason.UNREACHABLE, retriable=True)
        return Fetched(update)

    def serving_s(self) -> None:
        return None

    def _answer(self, by: PeerName, message: Message, reply: Reply) -> None:
        answer = self.gossip.answer(by, message)
        if isinstance(answer, PeerError):
            self.world.counts[f"calls refused: {answer.reason}"] += 1
            answer = PeerRefusedUs(self.name, answer.reason, "refused")
        reply(answer)
        self._process_inbox()

    def _process_inbox(self) -> None:
        """Handle the events that gossip made of peers' messages, as the event loop does."""
        heard, self._inbox = self._inbox, []
        for event, proofs in heard:
            self._when_awake(partial(self._handle, event, proofs))

    def _enqueue(self, event: Event, *proofs: SignedManifest) -> None:
        self._inbox.append((event, proofs))

    def _when_awake(self, action: Action) -> None:
        """Run the action now, after resuming if the site is suspended, or never if it is down."""
        if self.paused:
            self._deferred.append(self._unless_restarted(action))
        elif self.barrier is not None:
            action()

    def _handle(self, event: Event, proofs: tuple[SignedManifest, ...]) -> None:
        if self.barrier is None:
            return
        if self.world.chance(self.world.conditions.crash_any_time):
            self.crash()
            return
        self.world.record(self.name, event)
        self.checker.receives(self.name, event)
        if isinstance(event, Sealed):
            self._sealed_at = self.world.now
        barrier, manifests = self.barrier, self.gossip.manifests
        full = manifests.keep(proofs)
        self._run_or_crash(lambda: self._execute_all(barrier.handle(event, self.world.now)))
        if full and self.barrier is barrier:
            manifests.retain(barrier.referenced())
            self.checker.keeps(self.name, len(manifests))

    def _run_or_crash(self, act: Action) -> None:
        try:
            act()
        except Crash:
            self.crash()
        if self.barrier is not None:
            self.checker.steps(self.name)

    def _unless_restarted(self, action: Action) -> Action:
        life = self._boots
        return lambda: action() if self._boots == life else None

    def _schedule(self, delay_s: float, action: Action) -> None:
        self.world.after(delay_s, self._unless_restarted(action))

    def _tick(self) -> None:
        self._schedule(self.world.conditions.tick_s, self._tick)
        if not self.paused:
            self.handle(Tick())

    # Messages to peers.

    def _local_state(self) -> LocalState:
        """Return what peers may see: only what a restart would restore."""
        assert self.barrier is not None
        announced, seen = self.durable.announced, self.vouched()
        self.checker.announces(self.name, announced, seen)
        since = self._training_since
        evidence = [self.disk.evidence[peer] for peer in self.durable.quarantined]
        return LocalState(
            self.barrier.round,
            self.barrier.phase,
            self.world.manifests[announced] if announced else None,
            progress=int(self.world.now - since) if since is not None else 0,
            vouched=seen,
            evidence=tuple(evidence[:EVIDENCE_MAX]),
        )

    def vouched(self) -> tuple[Update, ...]:
        return self._seen

    def _contact_peers(self) -> None:
        """Contact every peer, at most once at a time, as in the product."""
        for name in self.others:
            if name in self.parameters.peers and name not in self._contacting:
                self._contacting.add(name)
                self._continue_contact(name, self.gossip.contact(name), None)

    def _continue_contact(
        self, peer: PeerName, contact: Coroutine[Any, Any, None], answer: Answer | None
    ) -> None:
        """Run the contact until its next call, or its end."""
        try:
            failed = isinstance(answer, PeerError)
            call = contact.throw(answer) if failed else contact.send(answer)
        except StopIteration:
            self._contacting.discard(peer)
        else:
            self._call(peer, call.message, partial(self._continue_contact, peer, contact))
        self._process_inbox()

    def _call(self, peer: PeerName, message: Message, go_on: Reply) -> None:
        """Make a call; the first answer counts, and so does a timeout."""
        life, waiting = self._boots, True

        def resume(answer: Answer) -> None:
            nonlocal waiting
            if waiting and self._boots == life:
                waiting = False
                self._when_awake(lambda: go_on(answer))

        self.world.ask(self.name, peer, message, resume)
        timeout = PeerUnreachable(peer, Reason.UNREACHABLE, "no answer")
        self._schedule(CALL_S, lambda: resume(timeout))

    # Commands.

    def _execute_all(self, commands: list[Command]) -> None:
        for command in commands:
            self.world.record(self.name, command)
            self._execute(command)

    def _execute(self, command: Command) -> None:
        world = self.world
        match command:
            case Greet() | Announce():
                self._local_state()  # also without peers
                self._contact_peers()
            case Train():
                self._training_since = world.now
                seconds = world.conditions.train_s * world.conditions.slowness.get(self.name, 1.0)
                digest = digest_of(self.name, world.random.getrandbits(64))
                self._handle_later(seconds * world.between((0.8, 1.2)), Trained(digest))
            case Seal(update, memory):
                self._training_since = None
                self._persist("P1", "seal", memory, partial(self._sign, update))
                self._handle_later(0.01, Sealed(update))
            case Fetch(update):
                takes_s = world.participants[update.peer].serving_s()
                takes_s = world.between(world.conditions.fetch_s) if takes_s is None else takes_s
                self._schedule(takes_s, lambda: self._fetch(update))
            case Judge():
                self.checker.closes(self.name, command)
                if self._sealed_at is not None:
                    self.longest_wait_s = max(self.longest_wait_s, world.now - self._sealed_at)
                verdicts = tuple(self._verdict(update) for update in command.updates)
                self._handle_later(world.between((0.1, 2.0)), Judged(command.round, verdicts))
            case Decide(decision, memory):
                decided = partial(self.checker.decides, self.name, decision)
                self._persist("P2", "decision", memory, decided)
            case Merge(decision):
                self.checker.merges(self.name, decision)
                model = digest_of("merge", len(decision.accepted))
                self._handle_later(world.between((0.1, 1.0)), Merged(decision.round, model))
            case Commit(round, _, memory):
                committed = partial(self.checker.commits, self.name, round)
                self._persist("P3", "commit", memory, committed)
            case Accuse(first, second, memory):
                accused = partial(self._keep_evidence, first, second)
                self._persist("P4", "evidence", memory, accused)
            case Note(kind, about, memory):
                point = "P5" if kind == "witness" else kind
                noted = partial(self._note, kind, about, memory)
                self._persist(point, kind, memory, noted)
            case Alarm(kind):
                world.counts[f"alarms: {kind}"] += 1
            case Finish():
                world.counts["finishes"] += 1

    def _handle_later(self, delay_s: float, event: Event) -> None:
        self._schedule(delay_s, lambda: self.handle(event))

    def _persist(
        self, point: str, kind: str, memory: DurableState, durable: Action | None = None
    ) -> None:
        self._may_crash(f"before {point}")
        self.durable = self.disk.write(kind, memory)
        self._seen = tuple(flat(self.durable.vouched.values()))
        self.world.counts["records"] += 1
        self.checker.persists(self.name, self.durable)
        if durable is not None:
            durable()
        self._may_crash(f"after {point}")

    def _may_crash(self, where: str) -> None:
        directed = self.world.crash_at == (self.name, where)
        if directed:
            self.world.crash_at = None
        if directed or self.world.chance(self.world.conditions.crash_at_point):
            self.world.counts[f"crashes {where}"] += 1
            raise Crash

    def _sign(self, update: Update) -> None:
        self.world.manifests[update] = sign(update)
        self.checker.signs(self.name, update)

    def _note(self, kind: str, about: Mapping[str, Any], memory: DurableState) -> None:
        found = map(self.gossip.manifests.find, flat(memory.vouched.values()))
        self.disk.seen = tuple(signed for signed in found if signed is not None)
        self.checker.notes(self.name, kind, about)

    def _keep_evidence(self, first: Update, second: Update) -> None:
        proof = self.gossip.manifests.proof(first, second)
        if proof is None:
            raise InvariantBroken("S7", f"{self.name} accuses {first.peer} and cannot prove it")
        self.disk.evidence[first.peer] = proof
        self.checker.accuses(self.name, first, second)

    def _fetch(self, update: Update) -> None:
        known = self.disk.fetched.get(update.peer) == update
        event = Fetched(update) if known else self.world.fetch(self.name, update)
        if isinstance(event, Fetched):
            self.disk.fetched[update.peer] = update
        self.handle(event)

    def _verdict(self, update: Update) -> Verdict:
        if update.digest in self.world.bad_updates:
            return Verdict(update.peer, False, Reason.TOO_FAR, score=0.1)
        if self.world.chance(self.world.conditions.rejected):
            return Verdict(update.peer, False, Reason.AGREEMENT_BELOW_TAU, score=0.1)
        return Verdict(update.peer, True, Reason.OK, score=0.9, weight=1.0)


def flat(tables: Iterable[tuple[Update, ...]]) -> Iterable[Update]:
    for table in tables:
        yield from table
