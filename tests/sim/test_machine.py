"""Hypothesis plays the world: it chooses what happens, and finds the shortest way to a failure.

The same sites, liars and referee as in the storms, but no message moves unless a rule moves it.
Longer: `SIM_PROFILE=thorough pytest tests/sim/test_machine.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lightyear_node.barrier import Blocked, Pardoned, Paused, Terms
from lightyear_node.records import PeerName, Round, Update
from tests.sim import planted
from tests.sim.federation import Federation
from tests.sim.liar import Liar
from tests.sim.referee import InvariantBroken
from tests.sim.site import Site
from tests.sim.story import tell
from tests.sim.world import Conditions

THOROUGH = os.environ.get("SIM_PROFILE") == "thorough"
NAMES = [PeerName(f"site-{letter}") for letter in "abcd"]
POINTS = ("P0", "P1", "P2", "P3", "P4", "P5", "generation", "rollback", "blocked", "pause")
STORY_LINES = 60
HELD_MAX = 200
"""Messages under way; older ones are lost."""

indices = st.integers(0, HELD_MAX - 1)
names = st.sampled_from(NAMES)


class Rounds(RuleBasedStateMachine):
    """Every rule ends with the referee's look at whoever did something: no invariants besides."""

    @initialize(echo=st.booleans(), lying=st.booleans(), seed=st.integers(0, 9))
    def begin(self, echo: bool, lying: bool, seed: int) -> None:
        terms = Terms(frozenset(NAMES), min_peers=2, faulty_max=1, rounds=1000, echo=echo)
        liars = {NAMES[-1]: "silent"} if lying else {}
        self.world = Federation(Conditions(terms, liars, train_s=5.0, unanswered=0.0), seed)
        self.world.held = []
        self.faces: list[Update] = []
        for liar in self.world.liars.values():
            liar.serves = 1.0
        for site in self.world.sites.values():
            site.boot()
        self.deliver_all()

    def site(self, name: PeerName) -> Site:
        return self.world.sites.get(name) or self.world.sites[NAMES[0]]

    @property
    def held(self) -> list[Any]:
        assert self.world.held is not None
        return self.world.held

    # The network.

    @precondition(lambda self: self.held)
    @rule(index=indices)
    def deliver(self, index: int) -> None:
        _, _, delivery = self.held.pop(index % len(self.held))
        delivery()

    @precondition(lambda self: self.held)
    @rule(to=names)
    def deliver_to(self, to: PeerName) -> None:
        """All that is under way to one site, and what comes of it for nobody else."""
        for message in [message for message in self.held if message[1] == to]:
            self.held.remove(message)
            message[2]()

    @rule()
    def deliver_all(self) -> None:
        under_way, self.world.held = self.held, []
        for _, _, delivery in under_way:
            delivery()

    @precondition(lambda self: self.held)
    @rule(index=indices)
    def duplicate(self, index: int) -> None:
        self.held.append(self.held[index % len(self.held)])

    @precondition(lambda self: self.held)
    @rule(to=names)
    def drop(self, to: PeerName) -> None:
        self.world.held = [message for message in self.held if message[1] != to]

    # Time: training, sealing, fetching, judging and merging end in it.

    @rule(seconds=st.sampled_from((0.2, 1.0, 6.0, 40.0)))
    def tick(self, seconds: float) -> None:
        self.world.run_until(self.world.now + seconds)
        del self.held[:-HELD_MAX]

    @rule()
    def go_on(self) -> None:
        """A round without trouble."""
        for _ in range(12):
            self.world.run_until(self.world.now + 1.0)
            self.deliver_all()

    # Processes and disks.

    @rule(name=names, point=st.sampled_from(POINTS), when=st.sampled_from(("before", "after")))
    def crash_at(self, name: PeerName, point: str, when: str) -> None:
        self.world.crash_at = (name, f"{when} {point}")

    @rule(name=names)
    def crash(self, name: PeerName) -> None:
        self.site(name).kill()

    @rule(name=names)
    def restart(self, name: PeerName) -> None:
        self.site(name).boot()

    @rule(name=names)
    def lose_disk(self, name: PeerName) -> None:
        self.site(name).kill()
        self.site(name).lose_disk()
        self.site(name).boot()

    @rule(name=names)
    def back_up(self, name: PeerName) -> None:
        self.site(name).back_up()

    @rule(name=names)
    def restore(self, name: PeerName) -> None:
        self.site(name).kill()
        self.site(name).restore()
        self.site(name).boot()

    # Operators.

    @rule(name=names, paused=st.booleans())
    def pause(self, name: PeerName, paused: bool) -> None:
        self.site(name).tell(Paused(paused))

    @rule(name=names, peers=st.frozensets(names, max_size=1))
    def block(self, name: PeerName, peers: frozenset[PeerName]) -> None:
        self.site(name).tell(Blocked(peers - {self.site(name).name}))

    @rule(name=names, peer=names)
    def pardon(self, name: PeerName, peer: PeerName) -> None:
        self.site(name).tell(Pardoned(peer))

    # A liar.

    def liar(self) -> Liar:
        return self.world.liars[NAMES[-1]]

    @precondition(lambda self: self.world.liars)
    @rule(ahead=st.integers(-2, 3), face=st.integers(0, 1), reborn=st.booleans())
    def sign(self, ahead: int, face: int, reborn: bool) -> None:
        if reborn:
            self.liar().be_reborn()
        round = Round(max(0, self.world.referee.highest + ahead))
        self.faces.append(self.liar().sign(round, f"{round}/{face}/{len(self.faces) * reborn}"))

    @precondition(lambda self: self.faces)
    @rule(to=names, index=indices, seen=st.lists(indices, max_size=2))
    def announce(self, to: PeerName, index: int, seen: list[int]) -> None:
        """Something it has signed, with some of what anybody has signed."""
        signed = sorted(self.world.signed, key=lambda update: (update.age, update.digest))
        reports = [signed[one % len(signed)] for one in seen]
        to = self.site(to).name
        self.liar().say(to, self.faces[index % len(self.faces)], *reports)
        self.held.pop()[2]()

    def teardown(self) -> None:
        """A failure comes with its story."""
        if sys.exc_info()[0] is not None:
            note(tell(self.world.history, last=STORY_LINES))


SETTINGS = settings(
    max_examples=5000 if THOROUGH else 150,
    stateful_step_count=150 if THOROUGH else 80,
    deadline=None,
    derandomize=not THOROUGH,
    suppress_health_check=list(HealthCheck),
)
TestRounds = Rounds.TestCase
TestRounds.settings = SETTINGS


# Not in every run: what invented inputs find within so few examples is a matter of luck.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "plant",
    [
        planted.a_decision_is_not_written_down,
        planted.a_new_generation_is_not_on_probation,
        planted.the_highest_round_that_anybody_claims_is_believed,
    ],
    ids=lambda plant: plant.__name__,
)
def test_hypothesis_would_notice(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    without_shrinking = settings(SETTINGS, phases=[Phase.generate], database=None)
    with pytest.raises(InvariantBroken):
        run_state_machine_as_test(Rounds, settings=without_shrinking)
