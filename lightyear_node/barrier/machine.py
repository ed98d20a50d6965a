"""The life of a round: one site's state machine.

It asks the view what may be concluded, and answers every event with commands.  The laws it keeps
are at the head of this folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from lightyear_node.barrier.closing import Closing, count, listed
from lightyear_node.barrier.memory import Decision, Memory
from lightyear_node.barrier.records import (
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
    Pardoned,
    Paused,
    Reformed,
    Reported,
    Seal,
    Sealed,
    Tick,
    Train,
    Trained,
)
from lightyear_node.barrier.terms import Phase, Standing, Terms, admissible_min_peers
from lightyear_node.barrier.view import View
from lightyear_node.errors import BarrierMisuse
from lightyear_node.records import Digest, Generation, PeerName, Reason, Round, Update, Verdict

DEGRADED = "degraded"
LEFT_OUT = "left_out"
ROLLED_BACK = "rolled_back"
# News of others need not wait for the next heartbeat, nor have a message each.
NEWS_PER_HEARTBEAT = 5


class Barrier:
    def __init__(self, us: PeerName, terms: Terms, memory: Memory) -> None:
        _check(us, terms)
        self.us = us
        self.terms = terms
        self.generation = memory.generation
        self.round = memory.round
        self.announced = memory.announced
        self.decision = memory.decision
        self.paused = memory.paused
        self.recovering = memory.recovering
        self.phase = Phase.OBSERVING

        self._view = View(terms, memory)
        self._closing = Closing(terms, self._view)
        self._wall_s = 0
        self._answered: set[PeerName] = set()
        self._own_elsewhere: Update | None = None
        self._rolled_back = False
        self._sealing: Update | None = None
        self._judging: Judge | None = None
        self._observe_until = 0.0
        self._beat_at = 0.0
        self._news_at = 0.0
        self._last_event_at: float | None = None
        self._slept_s = 0.0

    # The interface.

    def start(self, now: float, wall_s: int) -> list[Command]:
        """`wall_s` is only used to tell one life without memory from another."""
        if self._last_event_at is not None:
            raise BarrierMisuse("started twice")
        self._last_event_at = now
        self._wall_s = wall_s
        self._observe_until = now + self.terms.observe_s
        self._beat_at = now
        return self._proceed(now)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply one event.  One that cannot be true is refused: it raises and changes nothing."""
        self._refuse_untrue(event)
        now = self._lived(now)
        return self._apply(event, now) + self._proceed(now)

    def _apply(self, event: Event, now: float) -> list[Command]:
        view = self._view
        match event:
            case Tick():
                pass
            case Heard(peer, phase, progress):
                view.hear(peer, now)
                view.note_work(peer, phase, progress, now)
            case Answered(peer, yours):
                view.hear(peer, now)
                self._answered |= {peer} & self.terms.peers
                return self._recognise(yours) if yours else []
            case Announced(update, phase, progress):
                view.hear(update.peer, now)
                view.note_work(update.peer, phase, progress, now)
                return self._learn(update)
            case Reported(by, updates):
                return self._consider(by, updates)
            case Accused(first, second):
                return self._accuse(first, second)
            case Fetched(update):
                # What comes after its round has closed was not waited for, and is known to be late.
                closed = self.phase in (Phase.JUDGING, Phase.MERGING)
                if view.receive(update, now) and update.round >= self.round + closed:
                    self._closing.arrived(update.peer, now)
            case FetchFailed(update, reason, retriable):
                view.fail(update, reason, self._beat_at if retriable else None)
            case Trained(digest):
                return self._seal(digest)
            case Sealed(update):
                self.announced, self.round, self._sealing = update, update.round, None
                self._collect(now)
            case Judged(verdicts=verdicts):
                return self._decide(verdicts)
            case Merged(model=model):
                return self._commit(model)
            case Reformed() | Paused() | Blocked() | Pardoned():
                return self._obey(event)
            case _:
                assert_never(event)
        return []

    def standing(self, peer: PeerName, now: float) -> Standing:
        """What our round may still expect of a peer; only the AWAITED are worth waiting for."""
        return self._view.standing(peer, self.round, now - self._slept_s)

    def kept(self) -> frozenset[Digest]:
        """The updates, ours and others', whose bytes the store must not drop yet."""
        kept = self._view.kept(self.round)
        kept += [update for update in (self.announced, self._sealing) if update]
        kept += self._judging.updates if self._judging else ()
        kept += self.decision.accepted if self.decision else ()
        return frozenset(update.digest for update in kept)

    def waiting_for(self, now: float) -> str:
        """What we are doing, or whom we are waiting for, in one sentence."""
        match self.phase:
            case Phase.OBSERVING:
                share = f"{len(self._answered)} of {len(self._view.peers)}"
                if self.recovering and not self.terms.peers - self._view.excluded:
                    return "too few sites are left to look for"
                if self.recovering:
                    needed = count(self.terms.vouchers, "answer")
                    why = f"; {needed} needed to know which rounds we took part in"
                    return f"looking for the other sites ({share} have answered{why})"
                return f"looking for the other sites ({share} have answered)"
            case Phase.PAUSED:
                return f"paused before round {self.round}; an operator can resume it"
            case Phase.FINISHED:
                done = count(self.terms.rounds, "round")
                serving = ", still serving our last update" if self.terms.peers else ""
                return f"finished: {done} done{serving}"
            case Phase.TRAINING:
                doing = "training"
            case Phase.SEALING:
                doing = "storing our update"
            case Phase.COLLECTING:
                doing = self._closing.words(self.round, now - self._slept_s)
            case Phase.JUDGING:
                updates = self._judging.updates if self._judging else ()
                doing = f"judging {count(len(updates), 'update')}"
            case Phase.MERGING:
                updates = self.decision.accepted if self.decision else ()
                doing = f"merging {count(len(updates), 'update')}"
        return f"round {self.round}: {doing}"

    # Every event.

    def _refuse_untrue(self, event: Event) -> None:
        possible = self._last_event_at is not None
        match event:
            case Trained():
                possible &= self.phase is Phase.TRAINING
            case Sealed(update):
                possible &= update == self._sealing
            case Judged(round, verdicts):
                asked = {update.peer for update in self._judging.updates} if self._judging else ()
                told = [verdict.peer for verdict in verdicts]
                possible &= self.phase is Phase.JUDGING and round == self.round
                possible &= len(set(told)) == len(told) and set(told).issubset(asked)
            case Merged(round):
                possible &= self.phase is Phase.MERGING and round == self.round
            case Accused(first, second):
                possible &= (first.peer, first.age) == (second.peer, second.age)
                possible &= first.digest != second.digest
            case Reformed(terms):
                _check(self.us, terms)
        if not possible:
            raise BarrierMisuse(f"{event} while {self.phase} in round {self.round}")

    def _lived(self, now: float) -> float:
        """The time, without that which we have slept through.

        A stopped machine or a blocked loop is our own silence and not that of the others: of a gap
        between two events, no more than a heartbeat counts towards any timer.
        """
        assert self._last_event_at is not None
        self._slept_s += max(0.0, now - self._last_event_at - self.terms.heartbeat_s)
        self._last_event_at = now
        return now - self._slept_s

    def _proceed(self, now: float) -> list[Command]:
        """Do what the state now asks for.

        Every event ends here, so that a rule depends on what is known and never on which event
        came last: a lost or repeated one changes nothing.
        """
        commands: list[Command] = []
        if self.phase is Phase.OBSERVING and self._has_observed(now):
            commands += self._resume(now)
        if self._rolled_back and self.phase in _BETWEEN_STEPS:
            commands += self._begin_anew()
        if self._view.unrecorded and self.phase is not Phase.OBSERVING:
            self._beat_at = min(self._beat_at, max(now, self._news_at))
        if now >= self._beat_at:
            commands += self._beat(now)
        if self.phase not in (Phase.OBSERVING, Phase.PAUSED, Phase.FINISHED):
            # Also while we train: a slow site should have the others' updates when it is done.
            commands += map(Fetch, self._view.fetch(self.round, now))
        if self.phase is Phase.COLLECTING:
            commands += self._close(now)
        return commands

    def _beat(self, now: float) -> list[Command]:
        self._beat_at = now + self.terms.heartbeat_s
        self._news_at = now + self.terms.heartbeat_s / NEWS_PER_HEARTBEAT
        if self.phase is Phase.OBSERVING:
            return [Greet()]
        # What we vouch for is durable before anybody hears of it.
        noted = [Note("witness", {}, self._memory())] if self._view.unrecorded else []
        self._view.unrecorded = False
        return [*noted, Announce(self.announced)]

    # What others say.

    def _learn(self, update: Update) -> list[Command]:
        contradiction = self._view.learn(update, self.round)
        return self._accuse(*contradiction) if contradiction else []

    def _consider(self, by: PeerName, updates: tuple[Update, ...]) -> list[Command]:
        commands: list[Command] = []
        for update in updates:
            if update.peer == self.us:
                commands += self._recognise(update)
                continue
            commands += self._learn(update)
            if {by, update.peer} <= self.terms.peers and by != update.peer:
                self._view.testimony.report(by, update)
        return commands

    def _accuse(self, first: Update, second: Update) -> list[Command]:
        if not self._view.quarantine(first.peer, first.age):
            return []
        return [Accuse(first, second, self._memory())]

    # What an operator wants.

    def _obey(self, event: Reformed | Paused | Blocked | Pardoned) -> list[Command]:
        match event:
            case Reformed(terms, gone):
                self.terms = terms
                self._view.reform(terms, gone)
                self._answered &= terms.peers
                self._closing.reform(terms)
                noted = [Note("members", {"peers": sorted(terms.peers)}, self._memory())]
                more = self.phase is Phase.FINISHED and self.round < terms.rounds
                return [*noted, *(self._begin() if more else [])]
            case Paused(paused):
                if paused == self.paused:
                    return []
                self.paused = paused
                noted = [Note("pause" if paused else "resume", {}, self._memory())]
                return [*noted, *(self._begin() if self.phase is Phase.PAUSED else [])]
            case Blocked(peers):
                if peers == self._view.blocked:
                    return []
                self._view.blocked = peers
                return [Note("blocked", {"peers": sorted(peers)}, self._memory())]
            case Pardoned(peer):
                pardoned = self._view.pardon(peer)
                return [Note("pardon", {"peer": peer}, self._memory())] if pardoned else []

    # A memory that is lost, or was restored from a backup.

    def _recognise(self, update: Update) -> list[Command]:
        """Another site holds an update of our own."""
        known = self._own_elsewhere
        if known is None or update.age > known.age:
            self._own_elsewhere = update
        if self.recovering or not self._is_forgotten(update):
            return []
        if self.phase is not Phase.OBSERVING:
            self._rolled_back = True  # until the step that we are in is over
            return []
        self.recovering = True
        noted = Note("rollback", {"elsewhere": update.round}, self._memory())
        return [noted, Alarm(ROLLED_BACK, _ROLLED_BACK)]

    def _is_forgotten(self, update: Update) -> bool:
        """Whether an update of our own is one that we do not remember."""
        if update.generation < self.generation or update in (self.announced, self._sealing):
            return False
        return self.announced is None or update.age >= self.announced.age

    def _begin_anew(self) -> list[Command]:
        """In the middle of our life it turns out that it is not the first of this memory."""
        sealed = self.announced if self.phase is Phase.COLLECTING else None
        commands: list[Command] = [
            Alarm(ROLLED_BACK, _ROLLED_BACK),
            *self._next_generation(),
        ]
        if sealed is not None:  # what we have trained is still good, under another name
            commands += self._seal(sealed.digest)
        return commands

    def _next_generation(self) -> list[Command]:
        """From now on nothing that we sign can be mistaken for what we have signed before."""
        seen = self._own_elsewhere
        before = max(self._wall_s, self.generation, seen.generation if seen else 0)
        self.generation = Generation(before + 1)
        # Who was done already does the last round again: others may still need its last update,
        # and nobody would take what an earlier generation has sealed.
        reached = max(self.round, seen.round + 1 if seen else 0, self._view.supported())
        self.round = Round(min(reached, self.terms.rounds - 1))
        self.announced, self.decision = None, None
        self.recovering = self._rolled_back = False
        about = {"generation": self.generation, "round": self.round}
        return [Note("generation", about, self._memory())]

    # The life of a round.

    def _has_observed(self, now: float) -> bool:
        if self.recovering and len(self._answered) < self.terms.vouchers:
            return False
        everybody = self._answered >= self.terms.peers - self._view.excluded
        return everybody or now >= self._observe_until

    def _resume(self, now: float) -> list[Command]:
        """Go on where memory says we were."""
        self._beat_at = now
        if self.recovering:
            return [*self._next_generation(), *self._begin()]
        if self.decision is not None:
            self.phase = Phase.MERGING
            return [Merge(self.decision)]
        if self.announced is not None and self.announced.age == (self.generation, self.round):
            self._collect(now)
            return []
        return self._begin()

    def _begin(self) -> list[Command]:
        self.round = max(self.round, self._view.supported())
        if self.round >= self.terms.rounds:
            self.phase = Phase.FINISHED
            return [Finish()]
        if self.paused:
            self.phase = Phase.PAUSED
            return []
        self.phase = Phase.TRAINING
        return [Train(self.round)]

    def _seal(self, digest: Digest) -> list[Command]:
        after_last = self.announced.round + 1 if self.announced else 0
        tag = Round(max(self.round, self._view.supported(), after_last))
        update = Update(self.us, self.generation, tag, digest)
        self.phase = Phase.SEALING
        self._sealing = update
        return [Seal(update, self._memory())]

    def _collect(self, now: float) -> None:
        self.phase = Phase.COLLECTING
        self._closing.open(now)
        self._beat_at = now  # announce at once

    def _close(self, now: float) -> list[Command]:
        due = self._closing.due(self.round, now)
        if due is None:
            complaint = self._closing.complaint(self.round, now)
            return [Alarm(DEGRADED, f"round {self.round}: {complaint}")] if complaint else []
        cause, why = due
        usable: list[Update] = []
        missing: list[tuple[PeerName, Reason]] = []
        for peer in self._view.peers:
            reason = self._view.unusable(peer, self.round, now)
            if reason is None:
                usable.append(self._view.held(peer))
            else:
                missing.append((peer, reason))
        self.phase = Phase.JUDGING
        self._judging = Judge(self.round, tuple(usable), tuple(missing), cause, why)
        left_out = self._closing.close(cause, self.round, now)
        if not left_out:
            return [self._judging]
        # A loss for both sides, and so it is said aloud.
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
            if not self._view.is_welcome(update.peer):  # since it was asked for
                told = update.peer in self._view.quarantined
                reason = Reason.QUARANTINED if told else Reason.BLOCKED
                verdict = replace(verdict, accepted=False, reason=reason, weight=0.0)
            if verdict.accepted:
                accepted.append(update)
            lines.append(replace(verdict, digest=update.digest))
        lines.sort(key=lambda verdict: verdict.peer)
        self.phase = Phase.MERGING
        self.decision = Decision(
            judging.round, judging.cause, judging.why, tuple(accepted), tuple(lines)
        )
        return [Decide(self.decision, self._memory()), Merge(self.decision)]

    def _commit(self, model: Digest) -> list[Command]:
        assert self.decision is not None
        decision, self.decision = self.decision, None
        self._view.used.update({update.peer: update.age for update in decision.accepted})
        self.round = Round(decision.round + 1)
        return [Commit(decision.round, model, self._memory()), *self._begin()]

    def _memory(self) -> Memory:
        """For a command that makes it durable.

        What is being sealed counts as sealed, or a note that comes between would unsay it.
        """
        view, sealing = self._view, self._sealing
        return Memory(
            generation=self.generation,
            round=sealing.round if sealing else self.round,
            announced=sealing or self.announced,
            decision=self.decision,
            used=dict(view.used),
            recovering=self.recovering,
            vouched=dict(view.testimony.vouched),
            generations=dict(view.generations),
            quarantined=dict(view.quarantined),
            pardoned=dict(view.pardoned),
            blocked=view.blocked,
            paused=self.paused,
        )


_ROLLED_BACK = "others hold an update of ours that we do not remember"
_BETWEEN_STEPS = frozenset({Phase.TRAINING, Phase.COLLECTING, Phase.PAUSED})
"""In which no answer is due that would belong to the generation before."""


def _check(us: PeerName, terms: Terms) -> None:
    sites = len(terms.peers) + 1
    if us in terms.peers:
        raise BarrierMisuse(f"{us} cannot be its own peer")
    alone = not terms.peers and terms.min_peers == terms.faulty_max == 0
    if not alone and terms.min_peers not in admissible_min_peers(sites, terms.faulty_max):
        raise BarrierMisuse(
            f"min_peers of {terms.min_peers} is impossible with {sites} sites of which"
            f" {terms.faulty_max} may be faulty"
        )
