"""A site whose durable state is lost or outdated never signs a round twice."""

from __future__ import annotations

from typing import Any

import pytest

from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.protocol.events import (
    Accuse,
    Accused,
    Alarm,
    Announce,
    Announced,
    Answered,
    Blocked,
    Command,
    Commit,
    Event,
    Fetched,
    Greet,
    Merged,
    Note,
    Paused,
    Reconfigured,
    Reported,
    Seal,
    Sealed,
    Train,
    Trained,
)
from lightyear_node.protocol.parameters import Phase
from lightyear_node.protocol.state_machine import ROLLED_BACK
from lightyear_node.types import Digest, PeerName, Round, Update
from tests.support.barrier_bench import (
    MODEL,
    US,
    WALL_S,
    B,
    Bench,
    C,
    D,
    age,
    judge_in,
    memory,
    noted,
    only,
    update,
)

FIVE = tuple(PeerName(name) for name in "bcdef")


def lost(**parameters: Any) -> Bench:
    """A site without durable state, just started; one of three peers may be faulty."""
    bench = Bench(**{"faulty_max": 1, **parameters}, remembers=memory(recovering=True))
    bench.start(answering=False)
    return bench


def memories(commands: list[Command]) -> list[DurableState]:
    """All durable states, in order."""
    return [memory for command in commands if (memory := getattr(command, "memory", None))]


# Lost state.


def test_without_state_faulty_max_plus_one_peers_must_answer() -> None:
    bench = lost()
    assert only(Train, bench.wait(3600)) == []
    assert bench.tell(Answered(B)) == []
    assert only(Train, bench.wait(3600)) == []
    assert bench.phase is Phase.OBSERVING
    assert Train(Round(0)) in bench.tell(Answered(C))


def test_repeated_answers_of_one_peer_count_once() -> None:
    bench = lost()
    bench.wait(10)
    bench.tell(*[Answered(B)] * 5, Answered(PeerName("stranger")), Answered(US))
    assert bench.phase is Phase.OBSERVING


@pytest.mark.parametrize(("peers", "faulty_max", "min_peers"), [((B,), 0, 1), (FIVE, 1, 2)])
def test_after_enough_answers_the_rest_gets_the_usual_time(
    peers: tuple[PeerName, ...], faulty_max: int, min_peers: int
) -> None:
    bench = lost(peers=peers, faulty_max=faulty_max, min_peers=min_peers)
    bench.tell(*(Answered(peer) for peer in peers[: faulty_max + 1]))
    all_peers = len(peers) == faulty_max + 1
    assert (bench.phase is Phase.TRAINING) == all_peers
    assert (Train(Round(0)) in bench.wait(5)) != all_peers


def test_a_site_without_peers_does_not_wait_for_answers() -> None:
    bench = lost(peers=(), min_peers=0, faulty_max=0)
    assert (bench.phase, bench.barrier.generation) == (Phase.TRAINING, WALL_S + 1)


def test_the_status_says_what_recovery_waits_for() -> None:
    bench = lost()
    bench.tell(Answered(D))
    bench.wait(100)
    assert bench.barrier.waiting_for(bench.now) == (
        "looking for the other sites (1 of 3 have answered; 2 answers needed to know which rounds"
        " we took part in)"
    )


def test_greetings_keep_their_interval_whatever_arrives() -> None:
    bench = lost()
    bench.tell(Announced(update(B, 4)), Announced(update(C, 4)))
    assert bench.wait(60) == [Greet()] * 12


def test_nothing_is_announced_before_enough_peers_answered() -> None:
    bench = lost()
    bench.wait(600)
    bench.tell(Reported(B, (update(C, 3),)))
    assert only(Announce, bench.all) == []


@pytest.mark.parametrize(
    ("seen", "generation"),
    [
        ([], WALL_S + 1),
        ([update(US, 3, generation=7)], WALL_S + 1),
        ([update(US, 3, generation=WALL_S + 50)], WALL_S + 51),
        ([update(US, 3, generation=WALL_S + 50), update(US, 9, generation=2)], WALL_S + 51),
    ],
)
def test_the_generation_is_later_than_the_clock_and_all_seen_generations(
    seen: list[Update], generation: int
) -> None:
    bench = lost()
    answers = [Answered(B, each) for each in seen] or [Answered(B)]
    commands = bench.tell(*answers, Answered(C), Answered(D))
    note = noted("generation", commands)
    assert note.memory.generation == note.about["generation"] == generation
    assert commands.index(note) < commands.index(Train(note.memory.round))
    bench.sealed()
    assert bench.barrier.announced is not None
    assert bench.barrier.announced.generation == generation


@pytest.mark.parametrize(
    ("own", "others", "round"),
    [
        (None, {}, 0),
        (7, {}, 8),
        (7, {B: 3, C: 3}, 8),
        (7, {B: 20}, 8),  # one may lie
        (7, {B: 20, C: 12}, 12),
        (None, {B: 20, C: 12}, 12),
    ],
)
def test_the_round_is_after_our_last_and_at_least_the_supported_one(
    own: int | None, others: dict[PeerName, int], round: int
) -> None:
    bench = lost()
    bench.tell(*(Announced(update(peer, reached)) for peer, reached in others.items()))
    bench.tell(Reported(B, (update(US, own),)) if own is not None else Answered(B))
    commands = bench.tell(Answered(B), Answered(C), Answered(D))
    assert only(Train, commands) == [Train(Round(round))]
    assert noted("generation", commands).memory.round == round


def test_a_lost_state_starts_one_generation_without_a_rollback_alarm() -> None:
    bench = lost()
    bench.tell(*(Answered(peer, update(US, 5)) for peer in (B, C, D)))
    bench.wait(60, alive=[B, C, D])
    bench.tell(Answered(B, update(US, 5)), Reported(C, (update(US, 5),)))
    bench.sealed()
    bench.wait(30, alive=[B, C, D])
    assert [note.kind for note in only(Note, bench.all)] == ["generation"]
    assert only(Alarm, bench.all) == []


INTERRUPTIONS: list[Event] = [
    Announced(update(B, 4)),
    Reported(B, (update(C, 3), update(US, 6))),
    Accused(update(B, 4), update(B, 4, variant="'")),
    Paused(True),
    Blocked(frozenset({D})),
    Reconfigured(Bench(peers=(B, C, D), faulty_max=1, observe_s=9.0).parameters),
]


@pytest.mark.parametrize("event", INTERRUPTIONS)
def test_every_recorded_state_is_recovering_until_enough_peers_answered(event: Event) -> None:
    bench = lost()
    bench.tell(event)
    bench.wait(60)
    assert all(each.recovering for each in memories(bench.all))
    bench.tell(Answered(B), Answered(C), Answered(D))
    [*_, last] = memories(bench.all)
    assert not last.recovering


@pytest.mark.parametrize("event", INTERRUPTIONS)
def test_a_crash_during_recovery_changes_nothing(event: Event) -> None:
    first = lost()
    durable = [memory(recovering=True), *memories(first.tell(event) + first.wait(10))]
    bench = first.restarted(durable[-1])
    bench.start(answering=False)
    bench.wait(60)
    assert bench.phase is Phase.OBSERVING
    bench.tell(Answered(B, update(US, 6)), Answered(C))
    bench.tell(Paused(False))
    assert bench.barrier.generation > WALL_S
    assert bench.barrier.round == 7


def test_a_crash_after_the_new_generation_is_durable_keeps_it() -> None:
    bench = lost()
    note = noted("generation", bench.tell(*(Answered(peer, update(US, 5)) for peer in (B, C, D))))
    again = bench.restarted(note.memory)
    commands = again.start(answering=False)
    commands += again.tell(*(Answered(peer, update(US, 5)) for peer in (B, C, D)))
    assert Train(Round(6)) in commands
    assert only(Note, commands) == only(Alarm, commands) == []
    assert again.barrier.generation == note.memory.generation


# Outdated state.


def rolled_back(round: int = 3) -> Bench:
    """A site restored from a backup, just started."""
    bench = Bench(faulty_max=1, remembers=memory(round, announced=update(US, round)))
    bench.start(answering=False)
    return bench


@pytest.mark.parametrize(
    "elsewhere", [update(US, 4), update(US, 3, variant="'"), update(US, 0, generation=1)]
)
def test_a_rollback_found_while_observing_is_a_lost_state(elsewhere: Update) -> None:
    bench = rolled_back()
    commands = bench.tell(Answered(B, elsewhere))
    assert noted("rollback", commands).memory.recovering
    assert [alarm.kind for alarm in only(Alarm, commands)] == [ROLLED_BACK]
    bench.wait(60)
    assert bench.phase is Phase.OBSERVING  # for one answer is not enough now
    commands = bench.tell(Answered(C), Answered(D))
    assert Train(Round(max(3, elsewhere.round + 1))) in commands
    assert bench.barrier.generation > WALL_S
    assert bench.barrier.announced is None
    assert update(US, 3) not in [command.update for command in only(Announce, bench.all)]


@pytest.mark.parametrize("elsewhere", [update(US, 3), update(US, 2), update(US, 2, variant="'")])
def test_known_or_older_updates_are_no_rollback(elsewhere: Update) -> None:
    bench = rolled_back()
    bench.tell(*(Answered(peer, elsewhere) for peer in (B, C, D)))
    assert (bench.phase, bench.barrier.generation) == (Phase.COLLECTING, 0)
    bench.tell(Reported(B, (elsewhere,)))
    assert bench.barrier.announced == update(US, 3)
    assert only(Note, bench.all) == only(Alarm, bench.all) == []


def test_a_new_state_with_a_known_update_is_a_rollback() -> None:
    """A new state directory, although peers know an update of this site."""
    bench = Bench(faulty_max=1)
    bench.start(answering=False)
    bench.tell(Answered(B, update(US, 9)))
    assert Train(Round(10)) in bench.tell(Answered(C), Answered(D))


def test_a_decision_of_a_rolled_back_state_is_not_executed() -> None:
    before = Bench(faulty_max=1).in_round(3)
    judge = judge_in(before.delivered(*(update(peer, 3) for peer in (B, C, D))))
    [*_, decided] = memories(before.judged(judge))
    bench = before.restarted(decided)
    bench.start(answering=False)
    commands = bench.tell(*(Answered(peer, update(US, 4)) for peer in (B, C, D)))
    assert only(Train, commands) == [Train(Round(5))]
    assert bench.phase is Phase.TRAINING


def test_a_rollback_found_while_training() -> None:
    bench = Bench(faulty_max=1, remembers=memory(4, announced=update(US, 3)))
    bench.start()
    commands = bench.tell(Answered(B, update(US, 6)))
    assert [alarm.kind for alarm in only(Alarm, commands)] == [ROLLED_BACK]
    note = noted("generation", commands)
    assert (note.memory.generation, note.memory.round) == (WALL_S + 1, 7)
    assert note.memory.announced is None
    assert bench.phase is Phase.TRAINING  # what is being trained is not thrown away
    bench.sealed("trained")
    expected = Update(US, note.memory.generation, Round(7), Digest("trained"))
    assert bench.barrier.announced == expected
    bench.wait(30, alive=[B, C, D])
    assert len([note for note in only(Note, bench.all) if note.kind == "generation"]) == 1


def test_a_rollback_found_while_collecting_reseals_the_trained_model() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    commands = bench.tell(Reported(C, (update(US, 5),)))
    note = noted("generation", commands)
    [seal] = only(Seal, commands)
    assert commands.index(note) < commands.index(seal)
    assert seal.update.age == (WALL_S + 1, 6)
    assert seal.update.digest == update(US, 3).digest
    assert seal.memory.announced == seal.update
    announced = [command.update for command in only(Announce, commands + bench.wait(10))]
    assert set(announced) <= {None}
    assert Announce(seal.update) in bench.tell(Sealed(seal.update))
    assert (bench.phase, bench.barrier.round) == (Phase.COLLECTING, 6)


def test_another_own_update_of_the_same_age_is_a_rollback() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    [seal] = only(Seal, bench.tell(Reported(C, (update(US, 3, variant="'"),))))
    assert seal.update.age == (WALL_S + 1, 4)
    assert seal.update.digest == update(US, 3).digest


def test_a_rollback_found_while_judging_or_merging_waits_for_the_commit() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    judge = judge_in(bench.delivered(*(update(peer, 3) for peer in (B, C, D))))
    assert bench.tell(Answered(B, update(US, 8))) == []
    bench.wait(10, alive=[B, C, D])
    bench.judged(judge)
    bench.wait(10, alive=[B, C, D])
    assert bench.barrier.generation == 0
    commands = bench.tell(Merged(Round(3), MODEL))
    [commit] = only(Commit, commands)
    note = noted("generation", commands)
    assert commands.index(commit) < commands.index(note)
    assert commit.memory.used == note.memory.used == {peer: age(0, 3) for peer in (B, C, D)}
    assert note.memory.round == 9
    bench.sealed()
    assert bench.barrier.round == 9


def test_a_rollback_found_while_sealing_is_not_hidden_by_a_higher_tag() -> None:
    """The lost state may contain later updates than the one that a peer returned."""
    bench = Bench(faulty_max=1, remembers=memory(4, announced=update(US, 3)))
    bench.start()
    bench.tell(Announced(update(B, 6)), Announced(update(C, 6)))
    [seal] = only(Seal, bench.tell(Trained(Digest("trained"))))
    assert seal.update.age == (0, 6)
    bench.tell(Answered(B, update(US, 5)))
    commands = bench.tell(Sealed(seal.update))
    assert seal.update not in [command.update for command in only(Announce, commands)]
    [again] = only(Seal, commands)
    assert again.update.age == (WALL_S + 1, 6)
    assert again.update.digest == "trained"


def test_our_update_that_is_being_sealed_is_no_rollback() -> None:
    bench = Bench(faulty_max=1)
    bench.start()
    [seal] = only(Seal, bench.tell(Trained(Digest("trained"))))
    bench.tell(Answered(B, seal.update), Sealed(seal.update), Answered(C, seal.update))
    assert (bench.phase, bench.barrier.generation) == (Phase.COLLECTING, 0)


def test_a_rollback_found_while_paused() -> None:
    bench = Bench(faulty_max=1, remembers=memory(4, announced=update(US, 3), paused=True))
    bench.start()
    note = noted("generation", bench.tell(Answered(B, update(US, 6))))
    assert note.memory.paused
    assert bench.phase is Phase.PAUSED
    assert Train(Round(7)) in bench.tell(Paused(False))


def test_no_round_of_a_generation_is_ever_sealed_twice() -> None:
    """Whatever earlier updates of ours peers return, and however often."""
    bench = Bench(faulty_max=1, remembers=memory(4, announced=update(US, 3)))
    bench.start()
    former = [update(US, 6), update(US, 6, variant="'"), update(US, 2, generation=WALL_S + 9)]
    bench.tell(*(Answered(B, each) for each in former))
    bench.sealed("one")
    bench.tell(*(Reported(C, (each,)) for each in former))
    bench.tell(Answered(D, update(US, 30, generation=WALL_S + 10)))  # ours, but of another life
    [*_, seal] = only(Seal, bench.all)
    bench.tell(Sealed(seal.update))
    for peer in (B, C, D):
        bench.tell(Announced(update(peer, 40)), Fetched(update(peer, 40)))
    bench.finished_round(judge_in(bench.all))
    bench.sealed("two")
    sealed = [command.update.age for command in only(Seal, bench.all)]
    assert len(set(sealed)) == len(sealed) == 3
    assert sealed == sorted(sealed)
    assert not {each.age for each in former} & set(sealed)


def test_an_accusation_against_this_site_changes_nothing() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    assert only(Accuse, bench.tell(Accused(update(US, 2), update(US, 2, variant="'")))) == []
    assert (bench.phase, bench.barrier.round) == (Phase.COLLECTING, 3)
