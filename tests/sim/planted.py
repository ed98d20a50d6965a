"""Planted bugs: plausible mistakes, each a small patch of the real code.

They show what the simulator finds.  `catches` is a seed that reveals the bug, or a directed
schedule if random faults would rarely reveal it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from lightyear_node.errors import PeerMisbehaved
from lightyear_node.node.gossip import Gossip
from lightyear_node.protocol import echo_votes, manifests, round_closing
from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.protocol.echo_votes import EchoVotes
from lightyear_node.protocol.events import Command, Seal
from lightyear_node.protocol.manifests import ManifestStore
from lightyear_node.protocol.parameters import Cause, Parameters
from lightyear_node.protocol.peer_table import PeerTable
from lightyear_node.protocol.record_quota import RecordQuota
from lightyear_node.protocol.recovery import Recovery
from lightyear_node.protocol.round_closing import RoundClosing
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.types import (
    ROUND_MAX,
    Digest,
    Generation,
    PeerName,
    Reason,
    Round,
    SignedManifest,
    Update,
)
from tests.sim import directed
from tests.sim.disk import Disk
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


# Lost durable state.


def _not_recorded(kind: str) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        write = Disk.write

        def patched(self: Disk, point: str, memory: DurableState) -> DurableState:
            return memory if point == kind else write(self, point, memory)

        patch.setattr(Disk, "write", patched)

    return plant


def _not_restored(**lost: Any) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        read = Disk.read

        def patched(self: Disk) -> DurableState | None:
            memory = read(self)
            return replace(memory, **lost) if memory else None

        patch.setattr(Disk, "read", patched)

    return plant


def an_update_is_announced_but_not_recorded(patch: Patch) -> None:
    _not_recorded("seal")(patch)


def a_decision_is_not_recorded(patch: Patch) -> None:
    _not_recorded("decision")(patch)


def quarantine_is_forgotten_on_restart(patch: Patch) -> None:
    _not_restored(quarantined={})(patch)


def probation_is_forgotten_on_restart(patch: Patch) -> None:
    _not_restored(generations={})(patch)


def used_updates_are_forgotten_on_restart(patch: Patch) -> None:
    _not_restored(used={})(patch)


def the_echo_table_is_forgotten_on_restart(patch: Patch) -> None:
    _not_restored(vouched={})(patch)


def the_recovering_flag_is_forgotten_on_restart(patch: Patch) -> None:
    _not_restored(recovering=False)(patch)


def a_note_overwrites_what_is_being_sealed(patch: Patch) -> None:
    memory, seal = Barrier.durable_state, Barrier._seal

    def before(self: Barrier) -> DurableState:
        return replace(memory(self), announced=self.announced, round=self.round)

    def sealing(self: Barrier, digest: Digest) -> list[Command]:
        [command] = seal(self, digest)
        assert isinstance(command, Seal)
        return [Seal(command.update, memory(self))]

    patch.setattr(Barrier, "durable_state", before)
    patch.setattr(Barrier, "_seal", sealing)


# Closing a round.


def only_updates_of_the_same_round_count(patch: Patch) -> None:
    def strict(self: PeerTable, peer: PeerName, round: Round) -> bool:
        held = self._held.get(peer)
        return held is not None and held.round == round and peer not in self.excluded

    patch.setattr(PeerTable, "has_delivered", strict)


def probation_does_not_count_for_the_barrier(patch: Patch) -> None:
    has_delivered = PeerTable.has_delivered

    def strict(self: PeerTable, peer: PeerName, round: Round) -> bool:
        return has_delivered(self, peer, round) and not self.is_on_probation(peer, round)

    patch.setattr(PeerTable, "has_delivered", strict)


def a_round_goes_on_without_a_quorum_when_it_takes_long(patch: Patch) -> None:
    due = RoundClosing.due

    def impatient(self: RoundClosing, round: Round, now: float) -> tuple[Cause, str] | None:
        late = (Cause.GRACE, "it takes long") if now >= self._alarm_at else None
        return due(self, round, now) or late

    patch.setattr(RoundClosing, "due", impatient)


def the_grace_runs_without_a_quorum(patch: Patch) -> None:
    patch.setattr(
        round_closing, "_since", lambda since, holds, now: now if since is None else since
    )


def the_highest_claimed_round_is_believed(patch: Patch) -> None:
    def gullible(self: PeerTable) -> Round:
        return max((update.round for update in self._latest.values()), default=Round(-1))

    patch.setattr(PeerTable, "supported_round", gullible)


# Merging.


def an_update_is_merged_repeatedly(patch: Patch) -> None:
    patch.setattr(PeerTable, "_is_used", lambda self, update: False)


def relayed_signatures_are_not_checked(patch: Patch) -> None:
    patch.setattr(manifests, "verify_manifest", lambda signed, key: True)


def a_new_generation_is_not_on_probation(patch: Patch) -> None:
    patch.setattr(PeerTable, "is_on_probation", lambda self, peer, round: False)


def a_blocked_peer_is_merged(patch: Patch) -> None:
    patch.setattr(
        PeerTable,
        "excluded",
        property(lambda self: self.quarantined.keys() & self.parameters.peers),
    )


def one_witness_fewer_is_required(patch: Patch) -> None:
    quorum = Parameters.echo_quorum.fget  # type: ignore[attr-defined]
    patch.setattr(Parameters, "echo_quorum", property(lambda self: quorum(self) - 1))


# Echoes.


def the_echo_table_is_keyed_by_generation(patch: Patch) -> None:
    def is_news(self: EchoVotes, update: Update) -> bool:
        known = self.vouched.get(update.peer, ())
        return not known or update.age > known[0].age

    patch.setattr(EchoVotes, "is_news", is_news)


def an_echo_is_sent_before_it_is_durable(patch: Patch) -> None:
    def hasty(self: Site) -> tuple[Update, ...]:
        assert self.barrier is not None
        known = self.barrier.durable_state().vouched.values()
        return tuple(update for updates in known for update in updates)

    patch.setattr(Site, "vouched", hasty)


def every_update_ever_announced_is_remembered(patch: Patch) -> None:
    learn = PeerTable.learn

    def hoarding(
        self: PeerTable, update: Update, round: Round, now: float
    ) -> tuple[Update, Update] | None:
        self._extensions_lost[PeerName(update.digest)] = (0, 0)
        return learn(self, update, round, now)

    patch.setattr(PeerTable, "learn", hoarding)


# Equivocation and lost disks.


def generations_are_not_compared_in_evidence(patch: Patch) -> None:
    def contradict(one: Update, other: Update) -> bool:
        return one.round == other.round and one.digest != other.digest

    patch.setattr(echo_votes, "_contradict", contradict)


def a_pardoned_offence_is_punished_again(patch: Patch) -> None:
    quarantine = PeerTable.quarantine

    def unforgiving(self: PeerTable, first: Update, second: Update, round: Round) -> bool:
        self.unquarantined.pop(first.peer, None)
        return quarantine(self, first, second, round)

    patch.setattr(PeerTable, "quarantine", unforgiving)


def a_pardon_covers_later_offences(patch: Patch) -> None:
    pardon = PeerTable.unquarantine

    def boundless(self: PeerTable, peer: PeerName) -> bool:
        pardoned = pardon(self, peer)
        if pardoned:
            self.unquarantined[peer] = (Generation(ROUND_MAX), Round(ROUND_MAX))
        return pardoned

    patch.setattr(PeerTable, "unquarantine", boundless)


def a_lost_disk_goes_on_with_the_same_generation(patch: Patch) -> None:
    next_generation = Recovery.next_generation

    def same(self: Recovery, round: Round) -> Round:
        first = next_generation(self, round)
        self.generation = Generation(1)
        return first

    patch.setattr(Recovery, "next_generation", same)


def a_rolled_back_disk_is_not_noticed(patch: Patch) -> None:
    patch.setattr(Recovery, "learn_own", lambda self, update, announced, sealing: False)


# Resource use caused by peers.


def newer_updates_evict_the_proof_of_older_ones(patch: Patch) -> None:
    keep = ManifestStore.keep

    def patched(self: ManifestStore, manifests: Iterable[SignedManifest]) -> bool:
        news = keep(self, manifests)
        for peer in {update.peer for update in self._manifests}:
            known = sorted((u for u in self._manifests if u.peer == peer), key=lambda u: u.age)
            for update in known[:-4]:
                del self._manifests[update]
        return news

    patch.setattr(ManifestStore, "keep", patched)
    patch.setattr(ManifestStore, "holds", lambda self, update: True)


def stamps_are_followed_and_far_ones_refused(patch: Patch) -> None:
    stamps: dict[int, int] = {}

    def follow(check: str) -> None:
        original = getattr(Gossip, check)

        def checked(self: Gossip, peer: PeerName, theirs: Any) -> None:
            ours = stamps.get(id(self), 0)
            if theirs.lamport > ours + 2**40:
                raise PeerMisbehaved(peer, Reason.MALFORMED, "its stamp is far beyond ours")
            if id(self) not in stamps:
                state = self._state
                self._state = lambda: replace(state(), stamp=stamps[id(self)])
            stamps[id(self)] = max(ours, theirs.lamport) + 1
            original(self, peer, theirs)

        patch.setattr(Gossip, check, checked)

    def stamp(make: str) -> None:
        original = getattr(Gossip, make)

        def stamped(self: Gossip, peer: PeerName, **more: Any) -> Any:
            message = original(self, peer, **more)
            return replace(message, lamport=stamps.get(id(self), message.lamport))

        patch.setattr(Gossip, make, stamped)

    for check in ("_check_hello", "_check_announcement"):
        follow(check)
    for make in ("greeting", "_announcement"):
        stamp(make)


def the_full_grace_returns_with_any_update(patch: Patch) -> None:
    receive = PeerTable.receive

    def forgiving(self: PeerTable, update: Update, now: float) -> bool:
        self._extensions_lost.pop(update.peer, None)
        return receive(self, update, now)

    patch.setattr(PeerTable, "receive", forgiving)
    patch.setattr(PeerTable, "settle_extensions", lambda self, waited_for, accepted: None)


def every_message_of_a_peer_is_recorded(patch: Patch) -> None:
    patch.setattr(RecordQuota, "take", lambda self, peer, now: True)


def _bug(plant: Callable[[Patch], None], catches: int | Schedule, invariants: str) -> Bug:
    return Bug(plant, frozenset(invariants.split()), catches)


BUGS = [
    _bug(an_update_is_announced_but_not_recorded, 2002, "S1 S2"),
    _bug(a_decision_is_not_recorded, 2002, "S5"),
    _bug(only_updates_of_the_same_round_count, directed.one_is_ahead_and_two_are_behind, "L2"),
    _bug(a_round_goes_on_without_a_quorum_when_it_takes_long, 2000, "S10"),
    _bug(the_highest_claimed_round_is_believed, 2000, "S6 S10"),
    _bug(an_update_is_merged_repeatedly, 2002, "S4b"),
    _bug(relayed_signatures_are_not_checked, 2025, "S3 S7"),
    _bug(the_echo_table_is_forgotten_on_restart, directed.equivocation_around_a_crash, "S9"),
    _bug(
        the_recovering_flag_is_forgotten_on_restart,
        directed.a_crash_while_recovering,
        "recovery",
    ),
    _bug(quarantine_is_forgotten_on_restart, directed.a_restart_does_not_pardon, "S3 S10"),
    _bug(probation_is_forgotten_on_restart, 2002, "probation"),
    _bug(used_updates_are_forgotten_on_restart, 2030, "S4b"),
    _bug(
        a_note_overwrites_what_is_being_sealed,
        directed.a_note_between_sealing_and_announcing,
        "S1 S2 L2",
    ),
    _bug(probation_does_not_count_for_the_barrier, directed.two_on_probation, "L2"),
    _bug(the_grace_runs_without_a_quorum, 2000, "S10"),
    _bug(a_new_generation_is_not_on_probation, 2002, "probation"),
    _bug(a_blocked_peer_is_merged, 2003, "S3 S10"),
    _bug(one_witness_fewer_is_required, directed.one_witness_too_few, "S9"),
    _bug(the_echo_table_is_keyed_by_generation, 2006, "S9"),
    _bug(an_echo_is_sent_before_it_is_durable, 2000, "durable"),
    _bug(every_update_ever_announced_is_remembered, 2000, "S8"),
    _bug(generations_are_not_compared_in_evidence, 2006, "S7"),
    _bug(a_pardoned_offence_is_punished_again, directed.evidence_after_a_pardon, "pardon"),
    _bug(a_pardon_covers_later_offences, directed.a_second_offence_after_a_pardon, "S7"),
    _bug(a_lost_disk_goes_on_with_the_same_generation, 2064, "S1 S2"),
    _bug(newer_updates_evict_the_proof_of_older_ones, directed.old_evidence, "S7"),
    _bug(stamps_are_followed_and_far_ones_refused, directed.small_jumps, "L2"),
    _bug(the_full_grace_returns_with_any_update, directed.bad_updates_before_every_deadline, "L1"),
    _bug(every_message_of_a_peer_is_recorded, directed.ever_later_rounds, "S8"),
    _bug(a_rolled_back_disk_is_not_noticed, directed.a_backup_older_than_others_know, "S1"),
]
