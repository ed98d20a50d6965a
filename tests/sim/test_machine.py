"""Hypothesis chooses the events and shrinks a failure to the shortest sequence.

The same sites and checker as in the random runs, but no message moves unless a rule moves it.
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

from lightyear_node.protocol.events import Blocked, Paused, Unquarantined
from lightyear_node.protocol.parameters import Parameters
from lightyear_node.types import PeerName, Round, Update
from tests.sim import planted
from tests.sim.byzantine_site import ByzantineSite
from tests.sim.federation import Federation
from tests.sim.invariant_checker import InvariantBroken
from tests.sim.site import Site
from tests.sim.transcript import transcript
from tests.sim.world import Conditions

THOROUGH = os.environ.get("SIM_PROFILE") == "thorough"
NAMES = [PeerName(f"site-{letter}") for letter in "abcd"]
POINTS = ("P0", "P1", "P2", "P3", "P4", "P5", "generation", "rollback", "blocked", "pause")
TRANSCRIPT_LINES = 60
HELD_MAX = 200
"""Messages in flight; older ones are lost."""

indices = st.integers(0, HELD_MAX - 1)
names = st.sampled_from(NAMES)


class Rounds(RuleBasedStateMachine):
    """The invariant checker checks every step, so there are no invariants here."""

    @initialize(echo=st.booleans(), byzantine=st.booleans(), seed=st.integers(0, 9))
    def begin(self, echo: bool, byzantine: bool, seed: int) -> None:
        parameters = Parameters(frozenset(NAMES), min_peers=2, faulty_max=1, rounds=1000, echo=echo)
        behaviours = {NAMES[-1]: "silent"} if byzantine else {}
        self.world = Federation(
            Conditions(parameters, behaviours, train_s=5.0, unanswered=0.0), seed
        )
        self.world.held = []
        self.signed: list[Update] = []
        for attacker in self.world.byzantine.values():
            attacker.serves = 1.0
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
        """Deliver everything in flight to one site, and nothing that results from it."""
        for message in [message for message in self.held if message[1] == to]:
            self.held.remove(message)
            message[2]()

    @rule()
    def deliver_all(self) -> None:
        in_flight, self.world.held = self.held, []
        for _, _, delivery in in_flight:
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
    def run_a_round(self) -> None:
        """Run a round without faults."""
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
        self.site(name).handle(Paused(paused))

    @rule(name=names, peers=st.frozensets(names, max_size=1))
    def block(self, name: PeerName, peers: frozenset[PeerName]) -> None:
        self.site(name).handle(Blocked(peers - {self.site(name).name}))

    @rule(name=names, peer=names)
    def pardon(self, name: PeerName, peer: PeerName) -> None:
        self.site(name).handle(Unquarantined(peer))

    # A Byzantine site.

    def attacker(self) -> ByzantineSite:
        return self.world.byzantine[NAMES[-1]]

    @precondition(lambda self: self.world.byzantine)
    @rule(ahead=st.integers(-2, 3), version=st.integers(0, 1), reborn=st.booleans())
    def sign(self, ahead: int, version: int, reborn: bool) -> None:
        if reborn:
            self.attacker().start_new_generation()
        round = Round(max(0, self.world.checker.highest + ahead))
        self.signed.append(
            self.attacker().sign(round, f"{round}/{version}/{len(self.signed) * reborn}")
        )

    @precondition(lambda self: self.signed)
    @rule(to=names, index=indices, seen=st.lists(indices, max_size=2))
    def announce(self, to: PeerName, index: int, seen: list[int]) -> None:
        """Announce an update that it has signed, with reports of any signed updates."""
        signed = sorted(self.world.manifests, key=lambda update: (update.age, update.digest))
        reports = [signed[one % len(signed)] for one in seen]
        to = self.site(to).name
        self.attacker().announce(to, self.signed[index % len(self.signed)], *reports)
        self.held.pop()[2]()

    def teardown(self) -> None:
        """Print the transcript of a failure."""
        if sys.exc_info()[0] is not None:
            note(transcript(self.world.history, last=TRANSCRIPT_LINES))


SETTINGS = settings(
    max_examples=5000 if THOROUGH else 150,
    stateful_step_count=150 if THOROUGH else 80,
    deadline=None,
    derandomize=not THOROUGH,
    suppress_health_check=list(HealthCheck),
)
TestRounds = Rounds.TestCase
TestRounds.settings = SETTINGS


# Not in every run: with so few examples finding a bug is a matter of luck.
@pytest.mark.thorough
@pytest.mark.parametrize(
    "plant",
    [
        planted.a_decision_is_not_recorded,
        planted.a_new_generation_is_not_on_probation,
        planted.the_highest_claimed_round_is_believed,
    ],
    ids=lambda plant: plant.__name__,
)
def test_hypothesis_finds_a_planted_bug(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    without_shrinking = settings(SETTINGS, phases=[Phase.generate], database=None)
    with pytest.raises(InvariantBroken):
        run_state_machine_as_test(Rounds, settings=without_shrinking)
