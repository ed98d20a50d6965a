"""The barrier after the last round, and without peers."""

from __future__ import annotations

import pytest

from lightyear_node.protocol.events import (
    Alarm,
    Announce,
    Announced,
    Answered,
    Commit,
    Decide,
    Fetch,
    Finish,
    Greet,
    Heard,
    Merge,
    Train,
)
from lightyear_node.protocol.parameters import Cause, Phase
from lightyear_node.types import Round
from tests.support.barrier_bench import US, B, Bench, C, D, judge_in, memory, only, update

# The end.


def test_after_the_last_round_a_site_keeps_announcing() -> None:
    bench = Bench(peers=(B, C), rounds=4).in_round(3)
    judge = judge_in(bench.delivered(update(B, 3), update(C, 3)))
    [_, _, commit, finish] = bench.finished_round(judge)
    assert isinstance(commit, Commit)
    assert finish == Finish()
    assert bench.phase is Phase.FINISHED
    bench.wait(1)  # it reports which updates it knows
    assert bench.wait(30) == [Announce(update(US, 3))] * 6
    assert bench.tell(Announced(update(B, 4))) == bench.tell(Heard(B)) == []
    commands = bench.wait(30)
    assert {*only(Announce, commands)} == {Announce(update(US, 3))}
    assert only(Fetch, commands) == only(Train, commands) == []


def test_restart_after_the_end() -> None:
    bench = Bench(rounds=4, remembers=memory(4, announced=update(US, 3)))
    assert bench.start() == [Greet(), Finish(), Announce(update(US, 3))]


@pytest.mark.parametrize("collecting", [True, False])
def test_a_slow_site_finishes_after_all_others(collecting: bool) -> None:
    bench = Bench(faulty_max=1, rounds=20)
    if collecting:
        bench.in_round(7)
    else:
        bench.start()
    others = [update(peer, 19) for peer in (B, C, D)]
    commands = bench.delivered(*others)
    if collecting:
        assert Train(Round(19)) in bench.finished_round(judge_in(commands))
    commands = bench.sealed()
    assert bench.barrier.round == 19
    assert Finish() in bench.finished_round(judge_in(commands))


def test_no_site_goes_beyond_the_last_round() -> None:
    bench = Bench(rounds=20)
    bench.start()
    bench.tell(*(Announced(update(peer, 10**6)) for peer in (B, C, D)))
    bench.sealed()
    assert bench.barrier.round == 19


# Without peers.


def test_a_site_without_peers_completes_all_rounds() -> None:
    bench = Bench(peers=(), min_peers=0, rounds=3)
    assert Train(Round(0)) in bench.start()
    for number in range(3):
        commands = bench.sealed(f"ours {number}")
        judge = judge_in(commands)
        assert (judge.round, judge.updates, judge.missing) == (number, (), ())
        decide, merge, commit, then = bench.finished_round(judge)
        assert isinstance(decide, Decide)
        assert (decide.decision.cause, decide.decision.verdicts) == (Cause.ALL, ())
        assert decide.decision.why == "this site trains alone"
        assert isinstance(merge, Merge)
        assert isinstance(commit, Commit)
        assert then == (Train(Round(number + 1)) if number < 2 else Finish())
    assert bench.now == 50.0
    assert only(Fetch, bench.all) == only(Alarm, bench.all) == []
    assert bench.barrier.waiting_for(bench.now) == "finished: 3 rounds done"


def test_a_site_without_peers_continues_after_a_restart() -> None:
    bench = Bench(peers=(), min_peers=0, rounds=3, remembers=memory(1, announced=update(US, 1)))
    assert judge_in(bench.start()).round == 1


def test_non_members_do_not_affect_a_site_without_peers() -> None:
    bench = Bench(peers=(), min_peers=0, rounds=3)
    bench.start()
    assert bench.tell(Announced(update(B, 2)), Heard(C, Phase.TRAINING), Answered(D)) == []
    bench.sealed()
    assert bench.barrier.round == 0
