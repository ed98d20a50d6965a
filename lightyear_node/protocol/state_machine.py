"""The barrier of one site: a state machine that answers every event with commands.

Its laws are in the docstring of this package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import assert_never

from lightyear_node.errors import BarrierMisuse
from lightyear_node.protocol.durable_state import Decision, DurableState
from lightyear_node.protocol.events import (
    Accuse,
    Accused,
    Alarm,
    Announce,
    Announced,
    Answered,
    Blocked,
    Command,
    Commit,
    Decide,
    Event,
    Fetch,
    Fetched,
    FetchFailed,
    Finish,
    Greet,
    Heard,
    Judge,
    Judged,
    Merge,
    Merged,
    Note,
    Paused,
    Reconfigured,
    Reported,
    Seal,
    Sealed,
    Tick,
    Train,
    Trained,
    Unquarantined,
)
from lightyear_node.protocol.parameters import Parameters, Phase, Standing, check_parameters
from lightyear_node.protocol.peer_table import PeerTable, Provable
from lightyear_node.protocol.recovery import Recovery
from lightyear_node.protocol.round_closing import RoundClosing, count, listed
from lightyear_node.types import Digest, Generation, PeerName, Reason, Round, Update, Verdict

DEGRADED = "degraded"
LEFT_OUT = "left_out"
ROLLED_BACK = "rolled_back"
# News about peers is sent early, in batches: up to this many per heartbeat interval.
EARLY_HEARTBEATS = 5


class Barrier:
    def __init__(
        self,
        us: PeerName,
        parameters: Parameters,
        memory: DurableState,
        provable: Provable = lambda update: True,
    ) -> None:
        check_parameters(us, parameters)
        self.us = us
        self.parameters = parameters
        self.round = memory.round
        self.announced = memory.announced
        self.decision = memory.decision
        self.paused = memory.paused
        self.phase = Phase.OBSERVING

        self._table = PeerTable(parameters, memory, provable)
        self._closing = RoundClosing(parameters, self._table)
        self._recovery = Recovery(parameters, memory, self._table)
        self._sealing: Update | None = None
        self._judging: Judge | None = None
        self._heartbeat_at = 0.0
        self._early_heartbeat_at = 0.0
        self._last_event_at: float | None = None
        self._suspended_s = 0.0

    # Interface.

    def start(self, now: float, wall_s: int) -> list[Command]:
        """Begin observing; `wall_s` only makes the generation unique after a lost state."""
        if self._last_event_at is not None:
            raise BarrierMisuse("started twice")
        self._last_event_at = now
        self._recovery.start(now, wall_s)
        self._heartbeat_at = now
        return self._proceed(now)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply one event; an impossible one raises `BarrierMisuse` and changes nothing."""
        self._refuse_impossible(event)
        now = self._without_suspension(now)
        return self._apply(event, now) + self._proceed(now)

    def _apply(self, event: Event, now: float) -> list[Command]:
        table = self._table
        match event:
            case Tick():
                pass
            case Heard(peer, phase, progress):
                table.mark_alive(peer, now)
                table.note_activity(peer, phase, progress, now)
            case Answered(peer, yours):
                table.mark_alive(peer, now)
                self._recovery.answered(peer)
                return self._learn_own(yours) if yours else []
            case Announced(update, phase, progress):
                table.mark_alive(update.peer, now)
                table.note_activity(update.peer, phase, progress, now)
                return self._learn(update, now)
            case Reported(by, updates):
                return self._learn_all(by, updates, now)
            case Accused(first, second):
                return self._accuse(first, second)
            case Fetched(update):
                # After its round has closed, an update was not waited for: its delay means nothing.
                closed = self.phase in (Phase.JUDGING, Phase.MERGING)
                if table.receive(update, now) and update.round >= self.round + closed:
                    self._closing.arrived(update.peer, now)
            case FetchFailed(update, reason, retriable):
                table.fail(update, reason, self._heartbeat_at if retriable else None)
            case Trained(digest):
                return self._seal(digest)
            case Sealed(update):
                self.announced, self.round, self._sealing = update, update.round, None
                self._begin_collecting(now)
            case Judged(verdicts=verdicts):
                return self._decide(verdicts)
            case Merged(model=model):
                return self._commit(model)
            case Reconfigured() | Paused() | Blocked() | Unquarantined():
                return self._operate(event)
            case _:
                assert_never(event)
        return []

    def standing(self, peer: PeerName, now: float) -> Standing:
        """What our round can still expect from a peer; it waits only for AWAITED peers."""
        return self._table.standing(peer, self.round, now - self._suspended_s)

    def kept(self) -> frozenset[Digest]:
        """Digests of the updates, ours and the peers', that must stay in the store."""
        kept = self._table.kept(self.round)
        kept += [update for update in (self.announced, self._sealing) if update]
        kept += self._judging.updates if self._judging else ()
        kept += self.decision.accepted if self.decision else ()
        return frozenset(update.digest for update in kept)

    def referenced(self) -> set[Update]:
        """Updates of peers, in any table, whose signatures must stay stored."""
        judging = self._judging.updates if self._judging else ()
        return self._table.referenced().union(judging)

    def durable_state(self) -> DurableState:
        """What must survive a crash from now on; each command that records it contains it.

        An update that is being sealed counts as sealed; otherwise a note in between would undo it.
        """
        table, sealing = self._table, self._sealing
        return DurableState(
            generation=self.generation,
            round=sealing.round if sealing else self.round,
            announced=sealing or self.announced,
            decision=self.decision,
            used=dict(table.used),
            recovering=self.recovering,
            vouched=dict(table.echo_votes.vouched),
            generations=dict(table.generations),
            quarantined=dict(table.quarantined),
            unquarantined=dict(table.unquarantined),
            blocked=table.blocked,
            paused=self.paused,
        )

    @property
    def generation(self) -> Generation:
        """The generation that our updates are signed under."""
        return self._recovery.generation

    @property
    def recovering(self) -> bool:
        """Whether our durable state is lost or outdated, and no new generation has started yet."""
        return self._recovery.recovering

    @property
    def withheld(self) -> Mapping[PeerName, int]:
        """How many records were not written because a peer was beyond its quota."""
        return self._table.quota.withheld

    def waiting_for(self, now: float) -> str:
        """What this site is doing or waiting for, in one sentence."""
        match self.phase:
            case Phase.OBSERVING:
                return self._recovery.status_text()
            case Phase.PAUSED:
                return f"paused before round {self.round}; an operator can resume it"
            case Phase.FINISHED:
                done = count(self.parameters.rounds, "round")
                serving = ", still serving our last update" if self.parameters.peers else ""
                return f"finished: {done} done{serving}"
            case Phase.TRAINING:
                doing = "training"
            case Phase.SEALING:
                doing = "storing our update"
            case Phase.COLLECTING:
                doing = self._closing.status_text(self.round, now - self._suspended_s)
            case Phase.JUDGING:
                updates = self._judging.updates if self._judging else ()
                doing = f"judging {count(len(updates), 'update')}"
            case Phase.MERGING:
                updates = self.decision.accepted if self.decision else ()
                doing = f"merging {count(len(updates), 'update')}"
        return f"round {self.round}: {doing}"

    # For every event.

    def _refuse_impossible(self, event: Event) -> None:
        possible = self._last_event_at is not None
        match event:
            case Trained():
                possible &= self.phase is Phase.TRAINING
            case Sealed(update):
                possible &= update == self._sealing
            case Judged(round, verdicts):
                asked = {update.peer for update in self._judging.updates} if self._judging else ()
                judged = [verdict.peer for verdict in verdicts]
                possible &= self.phase is Phase.JUDGING and round == self.round
                possible &= len(set(judged)) == len(judged) and set(judged).issubset(asked)
            case Merged(round):
                possible &= self.phase is Phase.MERGING and round == self.round
            case Accused(first, second):
                possible &= (first.peer, first.age) == (second.peer, second.age)
                possible &= first.digest != second.digest
            case Reconfigured(parameters):
                check_parameters(self.us, parameters)
        if not possible:
            raise BarrierMisuse(f"{event} while {self.phase} in round {self.round}")

    def _without_suspension(self, now: float) -> float:
        """The time without gaps in which this process did not run.

        A suspended machine or a blocked loop must not look like silent peers: of a gap between two
        events, at most one heartbeat counts towards any timer.
        """
        assert self._last_event_at is not None
        self._suspended_s += max(0.0, now - self._last_event_at - self.parameters.heartbeat_s)
        self._last_event_at = now
        return now - self._suspended_s

    def _proceed(self, now: float) -> list[Command]:
        """Do what the state requires now.

        Every event ends here, so rules depend on the state and not on the last event: a lost or
        repeated event changes nothing.
        """
        commands: list[Command] = []
        if self.phase is Phase.OBSERVING and self._recovery.has_observed(now):
            commands += self._resume(now)
        if self._recovery.rolled_back and self.phase in _BETWEEN_STEPS:
            commands += self._replace_generation()
        if self._table.unrecorded and self.phase is not Phase.OBSERVING:
            self._heartbeat_at = min(self._heartbeat_at, max(now, self._early_heartbeat_at))
        if now >= self._heartbeat_at:
            commands += self._heartbeat(now)
        if self.phase not in (Phase.OBSERVING, Phase.PAUSED, Phase.FINISHED):
            # Also during training: a slow site should have the peers' updates when it is done.
            commands += map(Fetch, self._table.fetch(self.round, now))
        if self.phase is Phase.COLLECTING:
            commands += self._close(now)
        return commands

    def _heartbeat(self, now: float) -> list[Command]:
        self._heartbeat_at = now + self.parameters.heartbeat_s
        self._early_heartbeat_at = now + self.parameters.heartbeat_s / EARLY_HEARTBEATS
        if self.phase is Phase.OBSERVING:
            return [Greet()]
        # Our votes are durable before they are reported.
        noted = [Note("witness", {}, self.durable_state())] if self._table.unrecorded else []
        self._table.unrecorded = False
        return [*noted, Announce(self.announced)]

    # Announcements and reports.

    def _learn(self, update: Update, now: float) -> list[Command]:
        contradiction = self._table.learn(update, self.round, now)
        return self._accuse(*contradiction) if contradiction else []

    def _learn_all(self, by: PeerName, updates: tuple[Update, ...], now: float) -> list[Command]:
        commands: list[Command] = []
        for update in updates:
            if update.peer == self.us:
                commands += self._learn_own(update)
                continue
            commands += self._learn(update, now)
            if {by, update.peer} <= self.parameters.peers and by != update.peer:
                self._table.echo_votes.report(by, update)
        return commands

    def _accuse(self, first: Update, second: Update) -> list[Command]:
        if not self._table.quarantine(first, second, self.round):
            return []
        return [Accuse(first, second, self.durable_state())]

    # Operator commands.

    def _operate(self, event: Reconfigured | Paused | Blocked | Unquarantined) -> list[Command]:
        match event:
            case Reconfigured(parameters, removed):
                self.parameters = parameters
                self._table.reconfigure(parameters, removed)
                self._recovery.reconfigure(parameters)
                self._closing.reconfigure(parameters)
                noted = [Note("members", {"peers": sorted(parameters.peers)}, self.durable_state())]
                more = self.phase is Phase.FINISHED and self.round < parameters.rounds
                return [*noted, *(self._begin_round() if more else [])]
            case Paused(paused):
                if paused == self.paused:
                    return []
                self.paused = paused
                noted = [Note("pause" if paused else "resume", {}, self.durable_state())]
                return [*noted, *(self._begin_round() if self.phase is Phase.PAUSED else [])]
            case Blocked(peers):
                if peers == self._table.blocked:
                    return []
                self._table.blocked = peers
                return [Note("blocked", {"peers": sorted(peers)}, self.durable_state())]
            case Unquarantined(peer):
                changed = self._table.unquarantine(peer)
                return [Note("pardon", {"peer": peer}, self.durable_state())] if changed else []

    # Durable state that was lost, or restored from a backup.

    def _learn_own(self, update: Update) -> list[Command]:
        """A peer knows an update signed by us."""
        if not self._recovery.learn_own(update, self.announced, self._sealing):
            return []
        if self.phase is not Phase.OBSERVING:
            self._recovery.rolled_back = True  # handled when the current step is over
            return []
        self._recovery.recovering = True
        noted = Note("rollback", {"elsewhere": update.round}, self.durable_state())
        return [noted, Alarm(ROLLED_BACK, _ROLLED_BACK)]

    def _replace_generation(self) -> list[Command]:
        """Start a new generation in the middle of a round: our state was rolled back."""
        sealed = self.announced if self.phase is Phase.COLLECTING else None
        commands: list[Command] = [
            Alarm(ROLLED_BACK, _ROLLED_BACK),
            *self._next_generation(),
        ]
        if sealed is not None:  # the trained model is still good; seal it again
            commands += self._seal(sealed.digest)
        return commands

    def _next_generation(self) -> list[Command]:
        self.round = self._recovery.next_generation(self.round)
        self.announced, self.decision = None, None
        about = {"generation": self.generation, "round": self.round}
        return [Note("generation", about, self.durable_state())]

    # Phases of a round.

    def _resume(self, now: float) -> list[Command]:
        """Continue where the durable state ends."""
        self._heartbeat_at = now
        if self.recovering:
            return [*self._next_generation(), *self._begin_round()]
        if self.decision is not None:
            self.phase = Phase.MERGING
            return [Merge(self.decision)]
        if self.announced is not None and self.announced.age == (self.generation, self.round):
            self._begin_collecting(now)
            return []
        return self._begin_round()

    def _begin_round(self) -> list[Command]:
        self.round = max(self.round, self._table.supported_round())
        if self.round >= self.parameters.rounds:
            self.phase = Phase.FINISHED
            return [Finish()]
        if self.paused:
            self.phase = Phase.PAUSED
            return []
        self.phase = Phase.TRAINING
        return [Train(self.round)]

    def _seal(self, digest: Digest) -> list[Command]:
        after_last = self.announced.round + 1 if self.announced else 0
        tag = Round(max(self.round, self._table.supported_round(), after_last))
        update = Update(self.us, self.generation, tag, digest)
        self.phase = Phase.SEALING
        self._sealing = update
        return [Seal(update, self.durable_state())]

    def _begin_collecting(self, now: float) -> None:
        self.phase = Phase.COLLECTING
        self._closing.open(now)
        self._heartbeat_at = now  # announce at once

    def _close(self, now: float) -> list[Command]:
        due = self._closing.due(self.round, now)
        if due is None:
            complaint = self._closing.degraded_text(self.round, now)
            return [Alarm(DEGRADED, f"round {self.round}: {complaint}")] if complaint else []
        cause, why = due
        usable: list[Update] = []
        missing: list[tuple[PeerName, Reason]] = []
        for peer in self._table.peers:
            reason = self._table.unusable(peer, self.round, now)
            if reason is None:
                usable.append(self._table.held(peer))
            else:
                missing.append((peer, reason))
        self.phase = Phase.JUDGING
        self._judging = Judge(self.round, tuple(usable), tuple(missing), cause, why)
        left_out = self._closing.close(cause, self.round, now)
        if not left_out:
            return [self._judging]
        text = f"round {self.round}: closing without {listed(left_out)}"
        return [Alarm(LEFT_OUT, text, tuple(left_out)), self._judging]

    def _decide(self, verdicts: Iterable[Verdict]) -> list[Command]:
        assert self._judging is not None
        judging, self._judging = self._judging, None
        given = {verdict.peer: verdict for verdict in verdicts}
        accepted: list[Update] = []
        lines = [Verdict(peer, False, reason) for peer, reason in judging.missing]
        for update in judging.updates:
            verdict = given.get(update.peer, Verdict(update.peer, False, Reason.UNSCORED))
            if not self._table.is_included(update.peer):  # excluded during judging
                quarantined = update.peer in self._table.quarantined
                reason = Reason.QUARANTINED if quarantined else Reason.BLOCKED
                verdict = replace(verdict, accepted=False, reason=reason, weight=0.0)
            if verdict.accepted:
                accepted.append(update)
            lines.append(replace(verdict, digest=update.digest))
        lines.sort(key=lambda verdict: verdict.peer)
        self._table.settle_extensions(
            self._closing.waited_for, {update.peer for update in accepted}
        )
        self.phase = Phase.MERGING
        self.decision = Decision(
            judging.round, judging.cause, judging.why, tuple(accepted), tuple(lines)
        )
        return [Decide(self.decision, self.durable_state()), Merge(self.decision)]

    def _commit(self, model: Digest) -> list[Command]:
        assert self.decision is not None
        decision, self.decision = self.decision, None
        self._table.used.update({update.peer: update.age for update in decision.accepted})
        self.round = Round(decision.round + 1)
        self._table.quota.round_done()
        return [Commit(decision.round, model, self.durable_state()), *self._begin_round()]


_ROLLED_BACK = "others hold an update of ours that we do not remember"
_BETWEEN_STEPS = frozenset({Phase.TRAINING, Phase.COLLECTING, Phase.PAUSED})
"""Phases in which no pending answer belongs to the old generation."""
