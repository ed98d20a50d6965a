"""The attack on echo votes that random search does not find, with real barriers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.protocol.events import (
    Accuse,
    Announced,
    Command,
    Event,
    Fetch,
    Fetched,
    Judge,
    Reported,
    Seal,
    Sealed,
    Tick,
    Train,
    Trained,
)
from lightyear_node.protocol.parameters import Parameters, Standing
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.types import Digest, Generation, PeerName, Reason, Round, Update
from tests.support.barrier_bench import WALL_S, update

FAULTY = PeerName("b")


class Site:
    """One of four sites, honest, with a journal; its worker and network take no time."""

    def __init__(self, name: str, known: DurableState | None = None) -> None:
        self.name = PeerName(name)
        peers = frozenset(map(PeerName, "abcz")) - {self.name}
        parameters = Parameters(
            peers, min_peers=2, faulty_max=1, rounds=9, echo=True, observe_s=0.0
        )
        self.durable = known or DurableState(Generation(0), Round(0))
        self.barrier = Barrier(self.name, parameters, self.durable)
        self.now = 0.0
        self.accused: list[Accuse] = []
        self.judge: Judge | None = None
        self._carry_out(self.barrier.start(self.now, WALL_S))

    def hears(self, *events: Event) -> None:
        for event in events:
            self._carry_out(self.barrier.handle(event, self.now))

    def beats(self) -> None:
        self.now += 5.0
        self.hears(Tick())

    def tells(self, other: Site) -> None:
        """Its own update, and what it has made durable of those of others."""
        vouched = [each for known in self.durable.vouched.values() for each in known]
        assert self.barrier.announced is not None
        other.hears(Announced(self.barrier.announced), Reported(self.name, tuple(vouched)))

    def closes(self) -> Judge:
        for _ in range(20):
            if self.judge is not None:
                return self.judge
            self.beats()
        raise AssertionError(self.barrier.waiting_for(self.now))

    def _carry_out(self, commands: Iterable[Command]) -> None:
        for command in commands:
            self.durable = getattr(command, "memory", self.durable)
            match command:
                case Train():
                    self.hears(Trained(Digest(f"ours of {self.name}")))
                case Seal(sealed):
                    self.hears(Sealed(sealed))
                case Fetch(wanted):
                    self.hears(Fetched(wanted))
                case Judge():
                    self.judge = command
                case Accuse():
                    self.accused.append(command)


def played(other: Update, forgetful: bool) -> tuple[Site, Site, Site]:
    """The faulty site sends one update to A and Z, and `other` to C and to Z after its restart."""
    one = update(FAULTY, 0)
    a, c, z = Site("a"), Site("c"), Site("z")
    for site in (a, z):
        site.hears(Announced(one))
        site.beats()
    z.tells(a)
    assert one in a.closes().updates  # vouched for by its signer, Z and A
    # A is disconnected from here on.
    known = replace(z.durable, vouched={}, generations={}) if forgetful else z.durable
    z = Site("z", known)
    for site in (z, c):
        site.hears(Announced(other))
        site.beats()
    z.tells(c)
    return a, c, z


def test_no_two_sites_merge_different_updates_of_one_round() -> None:
    """The strongest attack: another generation, which C has no reason to doubt."""
    other = update(FAULTY, 0, generation=1, variant="'")
    _, c, z = played(other, forgetful=False)
    assert other not in c.closes().updates
    assert dict(c.closes().missing)[FAULTY] is Reason.UNCONFIRMED
    assert c.accused == z.accused == []


def test_two_updates_of_one_generation_are_detected() -> None:
    other = update(FAULTY, 0, variant="'")
    _, c, z = played(other, forgetful=False)
    for site in (c, z):
        assert [each.first.peer for each in site.accused] == [FAULTY]
        assert site.barrier.standing(FAULTY, site.now) is Standing.QUARANTINED
    c.beats()
    assert c.judge is None  # it needs A now


@pytest.mark.parametrize("generation", [0, 1])
def test_a_vote_table_that_is_not_durable_would_allow_it(generation: int) -> None:
    """Shows that the tests above can fail."""
    other = update(FAULTY, 0, generation, variant="'")
    _, c, _ = played(other, forgetful=True)
    assert other in c.closes().updates
