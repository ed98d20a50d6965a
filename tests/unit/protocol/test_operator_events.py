"""Operator commands: pausing in every phase, and blocking peers."""

from __future__ import annotations

from typing import Any

import pytest

from lightyear_node.protocol.events import (
    Announce,
    Announced,
    Blocked,
    Commit,
    Fetch,
    Fetched,
    Finish,
    Heard,
    Judge,
    Merged,
    Note,
    Paused,
    Train,
)
from lightyear_node.protocol.parameters import Cause, Phase, Standing
from lightyear_node.types import PeerName, Reason, Round
from tests.support.barrier_bench import (
    MODEL,
    US,
    B,
    Bench,
    C,
    D,
    judge_in,
    memory,
    noted,
    only,
    update,
)
from tests.support.barrier_phases import BUSY, brought_to, brought_to_the_end_of_the_round

# Pausing.


@pytest.mark.parametrize("phase", BUSY[1:])
def test_a_pause_completes_the_round(phase: Phase) -> None:
    bench = brought_to(phase)
    assert noted("pause", bench.tell(Paused(True))).memory.paused
    assert bench.phase is phase
    commands = brought_to_the_end_of_the_round(bench)
    [commit] = only(Commit, commands)
    assert (commit.round, commit.memory.paused) == (3, True)
    assert only(Train, commands) == []
    assert bench.phase is Phase.PAUSED
    assert bench.barrier.waiting_for(bench.now) == (
        "paused before round 4; an operator can resume it"
    )


def test_a_pause_while_observing_begins_no_round() -> None:
    bench = brought_to(Phase.OBSERVING)
    bench.tell(Paused(True))
    assert only(Train, brought_to_the_end_of_the_round(bench)) == []
    assert (bench.phase, bench.barrier.round) == (Phase.PAUSED, 3)


def test_a_pause_while_observing_completes_a_round_that_has_begun() -> None:
    bench = Bench(faulty_max=1, remembers=memory(3, announced=update(US, 3)))
    bench.start(answering=False)
    bench.tell(Paused(True))
    assert only(Commit, brought_to_the_end_of_the_round(bench)) != []
    assert (bench.phase, bench.barrier.round) == (Phase.PAUSED, 4)


@pytest.mark.parametrize("phase", BUSY)
def test_a_cancelled_pause_changes_nothing(phase: Phase) -> None:
    bench = brought_to(phase)
    bench.tell(Paused(True))
    assert not noted("resume", bench.tell(Paused(False))).memory.paused
    commands = brought_to_the_end_of_the_round(bench)
    assert Train(Round(4)) in commands


def paused(**parameters: Any) -> Bench:
    bench = brought_to(Phase.MERGING, **parameters)
    bench.tell(Paused(True), Merged(Round(3), MODEL))
    assert bench.phase is Phase.PAUSED
    return bench


def test_a_paused_site_keeps_announcing_and_fetches_nothing() -> None:
    bench = paused()
    bench.tell(*(Announced(update(peer, 4)) for peer in (B, C, D)))
    commands = bench.wait(3600, alive=[B, C, D])
    ours = bench.barrier.announced
    assert ours is not None
    assert set(only(Announce, commands)) == {Announce(ours)}
    assert len(only(Announce, commands)) >= 3600 / 5
    assert only(Fetch, commands) == []
    assert only(Train, commands) == []
    assert ours.digest in bench.barrier.kept()  # for it is served


def test_a_pause_survives_a_restart_and_so_does_its_end() -> None:
    bench = paused()
    [*_, known] = [each.memory for each in bench.all if isinstance(each, Commit)]
    again = bench.restarted(known)
    assert only(Train, again.start()) == []
    assert again.phase is Phase.PAUSED
    note = noted("resume", again.tell(Paused(False)))
    assert again.phase is Phase.TRAINING
    third = again.restarted(note.memory)
    assert Train(Round(4)) in third.start()


def test_pausing_twice_is_pausing_once() -> None:
    bench = paused()
    assert bench.tell(Paused(True)) == []
    [note, train] = bench.tell(Paused(False))
    assert (type(note), train) == (Note, Train(Round(4)))
    assert bench.tell(Paused(False)) == []


@pytest.mark.parametrize(
    ("others", "round"), [({}, 4), ({B: 90}, 4), ({B: 90, C: 12}, 12), ({B: 90, C: 12, D: 12}, 12)]
)
def test_a_resumed_site_begins_at_the_supported_round(
    others: dict[PeerName, int], round: int
) -> None:
    bench = paused()
    bench.tell(*(Announced(update(peer, reached)) for peer, reached in others.items()))
    assert Train(Round(round)) in bench.tell(Paused(False))


def test_a_pause_after_the_last_round_finishes() -> None:
    bench = brought_to(Phase.MERGING, rounds=4)
    commands = bench.tell(Paused(True), Merged(Round(3), MODEL))
    assert Finish() in commands
    assert bench.phase is Phase.FINISHED
    assert only(Train, bench.tell(Paused(False))) == []


def test_a_paused_peer_is_not_waited_for() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(update(D, 2), Phase.PAUSED))
    judge = judge_in(bench.delivered(update(B, 3), update(C, 3)))
    assert (judge.cause, judge.missing) == (Cause.ALL, ((D, Reason.STALE_ROUND),))
    assert judge.why == "nobody to wait for with 2 of 3; d is paused"


def test_a_peer_that_pauses_before_it_has_announced_anything_is_not_waited_for() -> None:
    bench = Bench(faulty_max=1).in_round(0)
    bench.tell(Heard(D, Phase.PAUSED))
    assert judge_in(bench.delivered(update(B, 0), update(C, 0))).cause is Cause.ALL


def test_an_announced_update_of_a_paused_peer_is_waited_for() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(update(D, 3), Phase.PAUSED))
    assert only(Judge, bench.delivered(update(B, 3), update(C, 3))) == []
    assert judge_in(bench.tell(Fetched(update(D, 3)))).updates[-1] == update(D, 3)


def test_a_peer_that_resumes_is_waited_for_again() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(update(D, 2), Phase.PAUSED), Heard(D, Phase.TRAINING))
    assert bench.barrier.standing(D, bench.now) is Standing.AWAITED


def test_paused_peers_do_not_count_towards_the_quorum() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(update(C, 2), Phase.PAUSED), Announced(update(D, 2), Phase.PAUSED))
    bench.delivered(update(B, 3))
    assert only(Judge, bench.wait(600, alive=[B])) == []


# Blocking.


def test_blocking_is_durable_and_reversible() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Announced(update(B, 3)), Fetched(update(B, 3)))
    note = noted("blocked", bench.tell(Blocked(frozenset({B}))))
    assert (note.about, note.memory.blocked) == ({"peers": [B]}, {B})
    assert bench.tell(Blocked(frozenset({B}))) == []
    again = bench.restarted(note.memory)
    again.start()
    assert again.barrier.standing(B, again.now) is Standing.BLOCKED
    assert bench.barrier.standing(B, bench.now) is Standing.BLOCKED
    assert noted("blocked", bench.tell(Blocked(frozenset()))).memory.blocked == frozenset()
    assert bench.barrier.standing(B, bench.now) is Standing.DELIVERED  # what is here is still good


def test_a_new_list_replaces_the_old_one() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Blocked(frozenset({B})), Blocked(frozenset({C})))
    standings = [bench.barrier.standing(peer, bench.now) for peer in (B, C)]
    assert standings == [Standing.AWAITED, Standing.BLOCKED]


def test_an_unblocked_peer_is_fetched_again() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    bench.tell(Blocked(frozenset({B})))
    assert only(Fetch, bench.tell(Announced(update(B, 3)))) == []
    assert Fetch(update(B, 3)) in bench.tell(Blocked(frozenset()))
