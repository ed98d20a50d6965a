"""Drives one barrier: the test sends the peers' events and sets the clock."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeVar

from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.protocol.events import (
    Announced,
    Answered,
    Command,
    Event,
    Fetched,
    Heard,
    Judge,
    Judged,
    Merged,
    Note,
    Seal,
    Sealed,
    Tick,
    Trained,
)
from lightyear_node.protocol.parameters import Parameters, Phase
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.types import Digest, Generation, PeerName, Reason, Round, Update, Verdict
from tests.support.object_state import state_of

US = PeerName("a")
B, C, D, E = (PeerName(name) for name in "bcde")
MODEL = Digest("model")
TICK_S = 0.5
WALL_S = 1_000
"""Wall clock in seconds when a bench starts its barrier."""

Kind = TypeVar("Kind", bound=Command)


def update(peer: PeerName, round: int, generation: int = 0, variant: str = "") -> Update:
    """An update of a peer; another `variant` has another digest for the same round."""
    digest = Digest(f"{peer}/{generation}/{round}{variant}")
    return Update(peer, Generation(generation), Round(round), digest)


def age(generation: int, round: int) -> tuple[Generation, Round]:
    return Generation(generation), Round(round)


def memory(round: int = 0, generation: int = 0, **known: Any) -> DurableState:
    return DurableState(Generation(generation), Round(round), **known)


def knowing(*updates: Update) -> dict[str, Any]:
    """Fields of the durable state after one update of each of these peers was announced."""
    return {
        "vouched": {each.peer: (each,) for each in updates},
        "generations": {each.peer: (each.generation, Round(0)) for each in updates},
    }


def only(kind: type[Kind], commands: Iterable[Command]) -> list[Kind]:
    return [command for command in commands if isinstance(command, kind)]


class Bench:
    """A barrier, its clock, and all commands that it has returned."""

    def __init__(
        self,
        peers: Iterable[PeerName] = (B, C, D),
        *,
        min_peers: int = 2,
        faulty_max: int = 0,
        rounds: int = 1000,
        remembers: DurableState | None = None,
        blocked: Iterable[PeerName] = (),
        **parameters: Any,
    ) -> None:
        self.parameters = Parameters(frozenset(peers), min_peers, faulty_max, rounds, **parameters)
        self.barrier = Barrier(US, self.parameters, remembers or memory(blocked=frozenset(blocked)))
        self.now = 50.0
        self.progress = 0
        self.all: list[Command] = []

    def start(self, *, answering: bool = True) -> list[Command]:
        commands = self._kept(self.barrier.start(self.now, WALL_S))
        if answering:
            commands += self.tell(*(Answered(peer) for peer in sorted(self.parameters.peers)))
        return commands

    def tell(self, *events: Event) -> list[Command]:
        commands: list[Command] = []
        for event in events:
            commands += self._kept(self.barrier.handle(event, self.now))
        return commands

    def wait(
        self,
        seconds: float,
        alive: Iterable[PeerName] = (),
        working: Iterable[PeerName] = (),
    ) -> list[Command]:
        """Let time pass; the `alive` send heartbeats, the `working` report progress in training."""
        commands: list[Command] = []
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.progress += 1
            signs = [Heard(peer) for peer in alive]
            signs += [Heard(peer, Phase.TRAINING, self.progress) for peer in working]
            commands += self.tell(*signs, Tick())
        return commands

    def sealed(self, digest: str = "ours") -> list[Command]:
        """Finish training and make the update durable."""
        commands = self.tell(Trained(Digest(digest)))
        [seal] = only(Seal, commands)
        return commands + self.tell(Sealed(seal.update))

    def delivered(self, *updates: Update) -> list[Command]:
        commands = self.tell(*(Announced(each) for each in updates))
        return commands + self.tell(*(Fetched(each) for each in updates))

    def judged(self, judge: Judge, accept: bool = True) -> list[Command]:
        reason = Reason.OK if accept else Reason.AGREEMENT_BELOW_TAU
        verdicts = tuple(Verdict(each.peer, accept, reason) for each in judge.updates)
        return self.tell(Judged(judge.round, verdicts))

    def finished_round(self, judge: Judge) -> list[Command]:
        return self.judged(judge) + self.tell(Merged(judge.round, MODEL))

    def in_round(self, round: int, **known: Any) -> Bench:
        """Collecting in this round, with nothing but `known` in the durable state."""
        ours = update(US, round)
        self.barrier = Barrier(US, self.parameters, memory(round, announced=ours, **known))
        self.start()
        assert (self.phase, self.barrier.round) == (Phase.COLLECTING, round)
        return self

    @property
    def phase(self) -> Phase:
        return self.barrier.phase

    @property
    def state(self) -> dict[str, Any]:
        """A copy of the whole state, to assert that an event changed nothing."""
        return state_of(self.barrier)

    def restarted(self, known: DurableState) -> Bench:
        """A new process with this durable state, read back from the journal's form."""
        plain = json.loads(json.dumps(known.to_plain()))
        assert DurableState.from_plain(plain) == known
        again = Bench()
        again.parameters, again.now = self.parameters, self.now
        again.barrier = Barrier(US, self.parameters, DurableState.from_plain(plain))
        return again

    def _kept(self, commands: list[Command]) -> list[Command]:
        self.all += commands
        return commands


def judge_in(commands: Iterable[Command]) -> Judge:
    [judge] = only(Judge, commands)
    return judge


def noted(kind: str, commands: Iterable[Command]) -> Note:
    """The only record of this kind."""
    [note] = [command for command in only(Note, commands) if command.kind == kind]
    return note
