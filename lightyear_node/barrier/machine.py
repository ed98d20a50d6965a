"""The life of a round: one site's state machine.

It asks the view what may be concluded, and answers every event with commands.  The laws it keeps
are at the head of this folder.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import assert_never

from lightyear_node.barrier.records import (
    Alarm,
    Announce,
    Announced,
    Answered,
    Cause,
    Command,
    Commit,
    Decide,
    Decision,
    Event,
    Excluded,
    Fetch,
    Fetched,
    FetchFailed,
    Finish,
    Greet,
    Heard,
    Judge,
    Judged,
    Memory,
    Merge,
    Merged,
    Phase,
    Seal,
    Sealed,
    Standing,
    Terms,
    Tick,
    Train,
    Trained,
    admissible_min_peers,
)
from lightyear_node.barrier.view import View
from lightyear_node.errors import BarrierMisuse
from lightyear_node.records import Digest, PeerName, Reason, Round, Update, Verdict

DEGRADED = "degraded"
# The alarm repeats ever more slowly, up to this many times its first waiting time.
DEGRADED_BACKOFF = 1.5
DEGRADED_BACKOFF_MAX = 4.0


class Barrier:
    def __init__(
        self,
        us: PeerName,
        terms: Terms,
        memory: Memory,
        excluded: frozenset[PeerName] = frozenset(),
    ) -> None:
        sites = len(terms.peers) + 1
        if us in terms.peers:
            raise BarrierMisuse(f"{us} cannot be its own peer")
        alone = not terms.peers and terms.min_peers == terms.faulty_max == 0
        if not alone and terms.min_peers not in admissible_min_peers(sites, terms.faulty_max):
            raise BarrierMisuse(
                f"min_peers of {terms.min_peers} is impossible with {sites} sites of which"
                f" {terms.faulty_max} may be faulty"
            )
        self.us = us
        self.terms = terms
        self.generation = memory.generation
        self.round = memory.round
        self.announced = memory.announced
        self.decision = memory.decision
        self.phase = Phase.OBSERVING

        self._view = View(terms, memory.used, excluded & terms.peers)
        self._answered: set[PeerName] = set()
        self._sealing: Update | None = None
        self._judging: Judge | None = None
        self._quorum_since: float | None = None
        self._overtaken_since: float | None = None
        self._alarm_wait_s = terms.degraded_s
        self._alarm_at = 0.0
        self._observe_until = 0.0
        self._beat_at = 0.0
        self._last_event_at: float | None = None
        self._slept_s = 0.0

    # The interface.

    def start(self, now: float) -> list[Command]:
        if self._last_event_at is not None:
            raise BarrierMisuse("started twice")
        self._last_event_at = now
        self._observe_until = now + self.terms.observe_s
        self._beat_at = now
        return self._proceed(now)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply one event.  One that cannot be true is refused: it raises and changes nothing."""
        self._refuse_untrue(event)
        now = self._lived(now)
        commands: list[Command] = []
        match event:
            case Tick():
                pass
            case Heard(peer, at_work):
                self._view.hear(peer, now)
                self._view.note_work(peer, at_work)
            case Answered(peer):
                self._view.hear(peer, now)
                self._answered |= {peer} & self.terms.peers
            case Announced(update, at_work):
                self._view.learn(update, now)
                self._view.note_work(update.peer, at_work)
            case Fetched(update):
                self._view.receive(update, now)
            case FetchFailed(update, reason, retriable):
                self._view.fail(update, reason, self._beat_at if retriable else None)
            case Trained(digest):
                commands = self._seal(digest)
            case Sealed(update):
                self.announced, self.round, self._sealing = update, update.round, None
                self._collect(now)
            case Judged(verdicts=verdicts):
                commands = self._decide(verdicts)
            case Merged(model=model):
                commands = self._commit(model)
            case Excluded(peers):
                self._view.excluded = peers & self.terms.peers
            case _:
                assert_never(event)
        return commands + self._proceed(now)

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
                return f"looking for the other sites ({share} have answered)"
            case Phase.FINISHED:
                done = _count(self.terms.rounds, "round")
                serving = ", still serving our last update" if self.terms.peers else ""
                return f"finished: {done} done{serving}"
            case Phase.TRAINING:
                doing = "training"
            case Phase.SEALING:
                doing = "storing our update"
            case Phase.COLLECTING:
                doing = self._collecting(now - self._slept_s)
            case Phase.JUDGING:
                updates = self._judging.updates if self._judging else ()
                doing = f"judging {_count(len(updates), 'update')}"
            case Phase.MERGING:
                updates = self.decision.accepted if self.decision else ()
                doing = f"merging {_count(len(updates), 'update')}"
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
        if now >= self._beat_at:
            self._beat_at = now + self.terms.heartbeat_s
            observing = self.phase is Phase.OBSERVING
            commands.append(Greet() if observing else Announce(self.announced))
        if self.phase not in (Phase.OBSERVING, Phase.FINISHED):
            # Also while we train: a slow site should have the others' updates when it is done.
            commands += map(Fetch, self._view.fetch(self.round, now))
        if self.phase is Phase.COLLECTING:
            commands += self._close(now) or self._complain(now)
        return commands

    # The life of a round.

    def _has_observed(self, now: float) -> bool:
        everybody = self._answered >= self.terms.peers - self._view.excluded
        return everybody or now >= self._observe_until

    def _resume(self, now: float) -> list[Command]:
        """Go on where memory says we were.  Recovery from a lost disk will branch off here."""
        self._beat_at = now
        if self.decision is not None:
            self.phase = Phase.MERGING
            return [Merge(self.decision)]
        if self.announced is not None and self.announced.age == (self.generation, self.round):
            self._collect(now)
            return []
        return self._begin()

    def _begin(self) -> list[Command]:
        if self.round >= self.terms.rounds:
            self.phase = Phase.FINISHED
            return [Finish()]
        self.phase = Phase.TRAINING
        self.round = max(self.round, self._view.supported())
        return [Train(self.round)]

    def _seal(self, digest: Digest) -> list[Command]:
        after_last = self.announced.round + 1 if self.announced else 0
        tag = Round(max(self.round, self._view.supported(), after_last))
        update = Update(self.us, self.generation, tag, digest)
        self.phase = Phase.SEALING
        self._sealing = update
        return [Seal(update, replace(self._memory(), round=tag, announced=update))]

    def _collect(self, now: float) -> None:
        self.phase = Phase.COLLECTING
        self._quorum_since = self._overtaken_since = None
        self._alarm_wait_s = self.terms.degraded_s
        self._alarm_at = now + self._alarm_wait_s
        self._beat_at = now  # announce at once

    def _close(self, now: float) -> list[Command]:
        closing = self._closing(now)
        if closing is None:
            return []
        cause, why = closing
        usable: list[Update] = []
        missing: list[tuple[PeerName, Reason]] = []
        for peer in self._view.peers:
            reason = self._view.unusable(peer, self.round, now)
            if reason is None:
                usable.append(self._view.held(peer))
            else:
                missing.append((peer, reason))
        if cause is Cause.GRACE:
            self._view.pass_over_the_unknown()
        self.phase = Phase.JUDGING
        self._judging = Judge(self.round, tuple(usable), tuple(missing), cause, why)
        return [self._judging]

    def _closing(self, now: float) -> tuple[Cause, str] | None:
        view, round = self._view, self.round
        delivered, awaited = view.delivered(round), view.awaited(round, now)
        missing = [peer for peer in view.peers if peer not in delivered]
        share = f"{len(delivered)} of {len(view.peers)}"
        quorum = len(delivered) >= self.terms.min_peers
        overtaken = view.supported() > round
        self._quorum_since = _since(self._quorum_since, quorum, now)
        self._overtaken_since = _since(self._overtaken_since, overtaken, now)

        if not view.peers:
            return Cause.ALL, "this site trains alone"
        if quorum and not missing:
            return Cause.ALL, f"all {_count(len(delivered), 'peer')} delivered"
        if quorum and not awaited:
            words = [f"{peer} is {view.standing(peer, round, now)}" for peer in missing]
            return Cause.ALL, f"nobody to wait for with {share}; {_list(words)}"
        if self._is_grace_over(self._quorum_since, now):
            # The slowest site may be the largest: it is not dropped while it says it is training.
            patient = self.terms.deadline_s > self.terms.grace_s
            working = view.working(round, now) if patient else []
            if not working:
                return Cause.GRACE, f"grace over with {share}; missing {_list(missing)}"
            if self._is_deadline_over(now):
                view.lose_patience(working)
                return Cause.GRACE, f"deadline over with {share}; missing {_list(missing)}"
        # What is on its way may still arrive, or a slow site would never merge anything.
        arriving = view.arriving(round) and not self._is_grace_over(self._overtaken_since, now)
        if overtaken and not arriving:
            beyond = view.beyond(round)
            are = "is" if beyond == 1 else "are"
            text = f"overtaken: {_count(beyond, 'peer')} {are} beyond round {round}"
            return Cause.OVERTAKEN, text
        return None

    def _is_grace_over(self, since: float | None, now: float) -> bool:
        return since is not None and now - since >= self.terms.grace_s

    def _is_deadline_over(self, now: float) -> bool:
        since = self._quorum_since
        return since is not None and now - since >= self.terms.deadline_s

    def _complain(self, now: float) -> list[Command]:
        """Say that too few updates are here.  Waiting longer is all that is done about it."""
        if self._quorum_since is not None or now < self._alarm_at:
            return []
        longest_s = self.terms.degraded_s * DEGRADED_BACKOFF_MAX
        self._alarm_wait_s = min(self._alarm_wait_s * DEGRADED_BACKOFF, longest_s)
        self._alarm_at = now + self._alarm_wait_s
        return [Alarm(DEGRADED, f"round {self.round}: {self._collecting(now)}")]

    def _decide(self, verdicts: Iterable[Verdict]) -> list[Command]:
        assert self._judging is not None
        judging, self._judging = self._judging, None
        given = {verdict.peer: verdict for verdict in verdicts}
        accepted: list[Update] = []
        lines = [Verdict(peer, False, reason) for peer, reason in judging.missing]
        for update in judging.updates:
            verdict = given.get(update.peer, Verdict(update.peer, False, Reason.UNSCORED))
            if update.peer in self._view.excluded:
                verdict = replace(verdict, accepted=False, reason=Reason.BLOCKED, weight=0.0)
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
        used = dict(self._view.used)
        return Memory(self.generation, self.round, self.announced, self.decision, used)

    # Words.

    def _collecting(self, now: float) -> str:
        view = self._view
        delivered = view.delivered(self.round)
        here = f"{len(delivered)} of at least {_count(self.terms.min_peers, 'update')} here"
        if self._quorum_since is not None:
            waited_s = now - self._quorum_since
            awaited = _list(view.awaited(self.round, now))
            if waited_s >= self.terms.grace_s:
                left_s = max(0.0, self.terms.deadline_s - waited_s)
                closing = f"still training; closing in {left_s:.0f} s at the latest"
                return f"waiting for {awaited} ({here}; {closing})"
            left_s = self.terms.grace_s - waited_s
            return f"waiting for {awaited} ({here}; closing in {left_s:.0f} s)"
        absent = [peer for peer in view.peers if peer not in {*delivered, *view.excluded}]
        if not absent:
            return f"too few sites are left to wait for ({here})"
        return f"waiting for {_list(absent)} ({here})"


def _since(since: float | None, holds: bool, now: float) -> float | None:
    """Since when a condition has held without a break."""
    if not holds:
        return None
    return now if since is None else since


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _list(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last
