"""A workbench for one barrier: its peers are played by hand, and its clock is turned by hand."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from lightyear_node.barrier import (
    Announced,
    Answered,
    Barrier,
    Command,
    Event,
    Fetched,
    Heard,
    Judge,
    Judged,
    Memory,
    Merged,
    Phase,
    Seal,
    Sealed,
    Terms,
    Tick,
    Trained,
)
from lightyear_node.records import Digest, Generation, PeerName, Reason, Round, Update, Verdict

US = PeerName("a")
B, C, D = (PeerName(name) for name in "bcd")
MODEL = Digest("model")
TICK_S = 0.5

Kind = TypeVar("Kind", bound=Command)


def update(peer: PeerName, round: int, generation: int = 0) -> Update:
    digest = Digest(f"{peer}/{generation}/{round}")
    return Update(peer, Generation(generation), Round(round), digest)


def memory(round: int = 0, **known: Any) -> Memory:
    return Memory(Generation(0), Round(round), **known)


def only(kind: type[Kind], commands: Iterable[Command]) -> list[Kind]:
    return [command for command in commands if isinstance(command, kind)]


class Bench:
    """A barrier, its clock, and everything it has commanded."""

    def __init__(
        self,
        peers: Iterable[PeerName] = (B, C, D),
        *,
        min_peers: int = 2,
        faulty_max: int = 0,
        rounds: int = 1000,
        deadline_s: float = 0.0,
        remembers: Memory | None = None,
        excluded: Iterable[PeerName] = (),
    ) -> None:
        self.terms = Terms(frozenset(peers), min_peers, faulty_max, rounds, deadline_s=deadline_s)
        self.barrier = Barrier(US, self.terms, remembers or memory(), frozenset(excluded))
        self.now = 50.0
        self.all: list[Command] = []

    def start(self, *, answering: bool = True) -> list[Command]:
        commands = self._kept(self.barrier.start(self.now))
        if answering:
            commands += self.tell(*(Answered(peer) for peer in sorted(self.terms.peers)))
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
        """Time passes; the `alive` are heard of all the while, the `working` say they train."""
        signs = [Heard(peer) for peer in alive] + [Heard(peer, at_work=True) for peer in working]
        commands: list[Command] = []
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            commands += self.tell(*signs, Tick())
        return commands

    def sealed(self, digest: str = "ours") -> list[Command]:
        """Training ends, and the update is made durable."""
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

    def in_round(self, round: int) -> Bench:
        """Collecting in this round, with an empty slate."""
        ours = update(US, round)
        self.barrier = Barrier(US, self.terms, memory(round, announced=ours))
        self.start()
        assert (self.phase, self.barrier.round) == (Phase.COLLECTING, round)
        return self

    @property
    def phase(self) -> Phase:
        return self.barrier.phase

    @property
    def state(self) -> dict[str, Any]:
        return copy.deepcopy({**vars(self.barrier), **vars(self.barrier._view), "_view": None})

    def _kept(self, commands: list[Command]) -> list[Command]:
        self.all += commands
        return commands


def judge_in(commands: Iterable[Command]) -> Judge:
    [judge] = only(Judge, commands)
    return judge
