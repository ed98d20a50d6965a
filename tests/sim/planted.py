"""Planted bugs: mistakes that look reasonable on paper, each a small change to the real code.

The simulator is worth what it would notice.  `catches` is a seed whose storm shows the bug, or a
directed schedule where chance would rarely find it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lightyear_node.barrier import Barrier, Cause, Command, Memory, Seal, Terms, closing, testimony
from lightyear_node.barrier.closing import Closing
from lightyear_node.barrier.testimony import WINDOW, Testimony
from lightyear_node.barrier.view import View
from lightyear_node.records import ROUND_MAX, Digest, Generation, PeerName, Round, Update
from tests.sim import directed
from tests.sim.disk import Disk
from tests.sim.ear import Ear
from tests.sim.site import Site

Patch = pytest.MonkeyPatch
Schedule = Callable[[], None]


@dataclass(frozen=True)
class Bug:
    plant: Callable[[Patch], None]
    invariants: frozenset[str]
    catches: int | Schedule

    @property
    def name(self) -> str:
        return self.plant.__name__


# What the disk forgets.


def _not_written(kind: str) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        write = Disk.write

        def forgetful(self: Disk, point: str, memory: Memory) -> Memory:
            return memory if point == kind else write(self, point, memory)

        patch.setattr(Disk, "write", forgetful)

    return plant


def _not_read(**lost: Any) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        read = Disk.read

        def forgetful(self: Disk) -> Memory | None:
            memory = read(self)
            return replace(memory, **lost) if memory else None

        patch.setattr(Disk, "read", forgetful)

    return plant


def an_update_is_announced_and_not_written_down(patch: Patch) -> None:
    _not_written("seal")(patch)


def a_decision_is_not_written_down(patch: Patch) -> None:
    _not_written("decision")(patch)


def quarantine_is_forgotten_on_restart(patch: Patch) -> None:
    _not_read(quarantined={})(patch)


def probation_is_forgotten_on_restart(patch: Patch) -> None:
    _not_read(generations={})(patch)


def what_was_used_is_forgotten_on_restart(patch: Patch) -> None:
    _not_read(used={})(patch)


def the_echo_table_is_forgotten_on_restart(patch: Patch) -> None:
    _not_read(vouched={})(patch)


def the_recovering_flag_is_forgotten_on_restart(patch: Patch) -> None:
    _not_read(recovering=False)(patch)


def a_note_unsays_what_is_being_sealed(patch: Patch) -> None:
    memory, seal = Barrier._memory, Barrier._seal

    def before(self: Barrier) -> Memory:
        return replace(memory(self), announced=self.announced, round=self.round)

    def sealing(self: Barrier, digest: Digest) -> list[Command]:
        [command] = seal(self, digest)
        assert isinstance(command, Seal)
        return [Seal(command.update, memory(self))]

    patch.setattr(Barrier, "_memory", before)
    patch.setattr(Barrier, "_seal", sealing)


# When a round closes.


def only_updates_of_the_same_round_count(patch: Patch) -> None:
    def strict(self: View, peer: PeerName, round: Round) -> bool:
        held = self._held.get(peer)
        return held is not None and held.round == round and peer not in self.excluded

    patch.setattr(View, "has_delivered", strict)


def probation_does_not_count_for_the_barrier(patch: Patch) -> None:
    has_delivered = View.has_delivered

    def strict(self: View, peer: PeerName, round: Round) -> bool:
        return has_delivered(self, peer, round) and not self.is_on_probation(peer, round)

    patch.setattr(View, "has_delivered", strict)


def a_round_goes_on_without_a_quorum_when_it_takes_long(patch: Patch) -> None:
    due = Closing.due

    def impatient(self: Closing, round: Round, now: float) -> tuple[Cause, str] | None:
        late = (Cause.GRACE, "it takes long") if now >= self._alarm_at else None
        return due(self, round, now) or late

    patch.setattr(Closing, "due", impatient)


def the_grace_runs_without_a_quorum(patch: Patch) -> None:
    patch.setattr(closing, "_since", lambda since, holds, now: now if since is None else since)


def the_highest_round_that_anybody_claims_is_believed(patch: Patch) -> None:
    def gullible(self: View) -> Round:
        return max((update.round for update in self._latest.values()), default=Round(-1))

    patch.setattr(View, "supported", gullible)


# What is merged.


def an_update_is_merged_as_often_as_it_is_here(patch: Patch) -> None:
    patch.setattr(View, "_is_used", lambda self, update: False)


def signatures_of_what_is_relayed_are_not_checked(patch: Patch) -> None:
    patch.setattr(Ear, "is_signed", lambda self, update: True)


def a_new_generation_is_not_on_probation(patch: Patch) -> None:
    patch.setattr(View, "is_on_probation", lambda self, peer, round: False)


def whoever_is_blocked_is_merged(patch: Patch) -> None:
    patch.setattr(
        View, "excluded", property(lambda self: self.quarantined.keys() & self.terms.peers)
    )


def one_more_witness_is_imagined(patch: Patch) -> None:
    quorum = Terms.echo_quorum.fget  # type: ignore[attr-defined]
    patch.setattr(Terms, "echo_quorum", property(lambda self: quorum(self) - 1))


# What is said of others.


def the_echo_table_is_keyed_by_generation(patch: Patch) -> None:
    def vouch(self: Testimony, update: Update) -> bool:
        known = self.vouched.get(update.peer, ())
        if known and update.age <= known[0].age:
            return False
        self.vouched[update.peer] = (update, *known)[:WINDOW]
        return True

    patch.setattr(Testimony, "vouch", vouch)


def an_echo_is_told_before_it_is_durable(patch: Patch) -> None:
    def hasty(self: Site) -> tuple[Update, ...]:
        assert self.barrier is not None
        known = self.barrier._view.testimony.vouched.values()
        return tuple(update for updates in known for update in updates)

    patch.setattr(Site, "vouched", hasty)


def every_update_ever_announced_is_remembered(patch: Patch) -> None:
    learn = View.learn

    def hoarding(self: View, update: Update, round: Round) -> tuple[Update, Update] | None:
        self._failed[PeerName(update.digest)] = update  # type: ignore[assignment]
        return learn(self, update, round)

    patch.setattr(View, "learn", hoarding)


# Two stories, and who has forgotten one.


def generations_are_not_compared_in_evidence(patch: Patch) -> None:
    def contradict(one: Update, other: Update) -> bool:
        return one.round == other.round and one.digest != other.digest

    patch.setattr(testimony, "_contradict", contradict)


def what_was_forgiven_is_held_against_it_again(patch: Patch) -> None:
    quarantine = View.quarantine

    def unforgiving(self: View, peer: PeerName, age: tuple[Generation, Round]) -> bool:
        self.pardoned.pop(peer, None)
        return quarantine(self, peer, age)

    patch.setattr(View, "quarantine", unforgiving)


def a_pardon_is_for_ever(patch: Patch) -> None:
    pardon = View.pardon

    def boundless(self: View, peer: PeerName) -> bool:
        pardoned = pardon(self, peer)
        if pardoned:
            self.pardoned[peer] = (Generation(ROUND_MAX), Round(ROUND_MAX))
        return pardoned

    patch.setattr(View, "pardon", boundless)


def a_lost_disk_goes_on_with_the_same_generation(patch: Patch) -> None:
    def same(self: Barrier) -> list[Command]:
        commands = following(self)
        self.generation = Generation(1)
        [note] = commands
        return [replace(note, memory=self._memory())]  # type: ignore[call-arg]

    following = Barrier._next_generation
    patch.setattr(Barrier, "_next_generation", same)


def a_rolled_back_disk_is_not_noticed(patch: Patch) -> None:
    patch.setattr(Barrier, "_is_forgotten", lambda self, update: False)


def _bug(plant: Callable[[Patch], None], catches: int | Schedule, invariants: str) -> Bug:
    return Bug(plant, frozenset(invariants.split()), catches)


BUGS = [
    _bug(an_update_is_announced_and_not_written_down, 2001, "S1 S2"),
    _bug(a_decision_is_not_written_down, 2002, "S5"),
    _bug(only_updates_of_the_same_round_count, directed.one_is_ahead_and_two_are_behind, "L2"),
    _bug(a_round_goes_on_without_a_quorum_when_it_takes_long, 2000, "S10"),
    _bug(the_highest_round_that_anybody_claims_is_believed, 2000, "S6 S10"),
    _bug(an_update_is_merged_as_often_as_it_is_here, 2002, "S4b"),
    _bug(signatures_of_what_is_relayed_are_not_checked, 2010, "S3 S7"),
    _bug(the_echo_table_is_forgotten_on_restart, directed.two_faces_around_a_crash, "S9"),
    _bug(
        the_recovering_flag_is_forgotten_on_restart,
        directed.a_crash_while_recovering,
        "recovery",
    ),
    _bug(quarantine_is_forgotten_on_restart, directed.a_restart_does_not_pardon, "S3 S10"),
    _bug(probation_is_forgotten_on_restart, 2002, "probation"),
    _bug(what_was_used_is_forgotten_on_restart, 2005, "S4b"),
    _bug(
        a_note_unsays_what_is_being_sealed,
        directed.a_note_between_sealing_and_announcing,
        "S1 S2 L2",
    ),
    _bug(probation_does_not_count_for_the_barrier, directed.two_on_probation, "L2"),
    _bug(the_grace_runs_without_a_quorum, 2000, "S10"),
    _bug(a_new_generation_is_not_on_probation, 2002, "probation"),
    _bug(whoever_is_blocked_is_merged, 2001, "S3 S10"),
    _bug(one_more_witness_is_imagined, directed.one_witness_too_few, "S9"),
    _bug(the_echo_table_is_keyed_by_generation, 2002, "S9"),
    _bug(an_echo_is_told_before_it_is_durable, 2000, "durable"),
    _bug(every_update_ever_announced_is_remembered, 2000, "S8"),
    _bug(generations_are_not_compared_in_evidence, 2002, "S7"),
    _bug(what_was_forgiven_is_held_against_it_again, directed.evidence_after_a_pardon, "pardon"),
    _bug(a_pardon_is_for_ever, directed.a_second_offence_after_a_pardon, "S7"),
    _bug(a_lost_disk_goes_on_with_the_same_generation, 2008, "S1 S2"),
    _bug(a_rolled_back_disk_is_not_noticed, directed.a_backup_that_others_know_better, "S1"),
]
