"""A workbench for one barrier: its peers are played by hand, and its clock is turned by hand."""

from __future__ import annotations

import copy
import json
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
    Note,
    Phase,
    Seal,
    Sealed,
    Terms,
    Tick,
    Trained,
)
from lightyear_node.records import Digest, Generation, PeerName, Reason, Round, Update, Verdict

US = PeerName("a")
B, C, D, E = (PeerName(name) for name in "bcde")
MODEL = Digest("model")
TICK_S = 0.5
WALL_S = 1_000
"""What the wall clock of a bench shows when its barrier starts."""

Kind = TypeVar("Kind", bound=Command)


def update(peer: PeerName, round: int, generation: int = 0, story: str = "") -> Update:
    """What a peer announces; another `story` is another digest for the same."""
    digest = Digest(f"{peer}/{generation}/{round}{story}")
    return Update(peer, Generation(generation), Round(round), digest)


def age(generation: int, round: int) -> tuple[Generation, Round]:
    return Generation(generation), Round(round)


def memory(round: int = 0, generation: int = 0, **known: Any) -> Memory:
    return Memory(Generation(generation), Round(round), **known)


def heard_of(*updates: Update) -> dict[str, Any]:
    """What is remembered after hearing of one update of each of these peers."""
    return {
        "vouched": {each.peer: (each,) for each in updates},
        "generations": {each.peer: (each.generation, Round(0)) for each in updates},
    }


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
        remembers: Memory | None = None,
        blocked: Iterable[PeerName] = (),
        **terms: Any,
    ) -> None:
        self.terms = Terms(frozenset(peers), min_peers, faulty_max, rounds, **terms)
        self.barrier = Barrier(US, self.terms, remembers or memory(blocked=frozenset(blocked)))
        self.now = 50.0
        self.progress = 0
        self.all: list[Command] = []

    def start(self, *, answering: bool = True) -> list[Command]:
        commands = self._kept(self.barrier.start(self.now, WALL_S))
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
        """Time passes; the `alive` are heard of all the while, the `working` train on and on."""
        commands: list[Command] = []
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self.progress += 1
            signs = [Heard(peer) for peer in alive]
            signs += [Heard(peer, Phase.TRAINING, self.progress) for peer in working]
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

    def in_round(self, round: int, **known: Any) -> Bench:
        """Collecting in this round, with an empty slate or with what else is `known`."""
        ours = update(US, round)
        self.barrier = Barrier(US, self.terms, memory(round, announced=ours, **known))
        self.start()
        assert (self.phase, self.barrier.round) == (Phase.COLLECTING, round)
        return self

    @property
    def phase(self) -> Phase:
        return self.barrier.phase

    @property
    def state(self) -> dict[str, Any]:
        """All of it, so that a test can say that nothing has changed."""
        parts = (self.barrier, self.barrier._view, self.barrier._closing)
        testimony, patience = self.barrier._view.testimony, self.barrier._closing._patience
        return {
            f"{type(part).__name__}.{name}": copy.deepcopy(value)
            for part in (*parts, testimony, patience)
            for name, value in vars(part).items()
            if name not in ("_view", "_closing", "_patience", "testimony")
        }

    def restarted(self, known: Memory) -> Bench:
        """A new process with this memory, as the journal gives it back, under the same terms."""
        plain = json.loads(json.dumps(known.to_plain()))
        assert Memory.from_plain(plain) == known
        again = Bench()
        again.terms, again.now = self.terms, self.now
        again.barrier = Barrier(US, self.terms, Memory.from_plain(plain))
        return again

    def _kept(self, commands: list[Command]) -> list[Command]:
        self.all += commands
        return commands


def judge_in(commands: Iterable[Command]) -> Judge:
    [judge] = only(Judge, commands)
    return judge


def noted(kind: str, commands: Iterable[Command]) -> Note:
    """The one record of this kind."""
    [note] = [command for command in only(Note, commands) if command.kind == kind]
    return note
