"""A peer with a new generation counts for the barrier but is not merged for some rounds."""

from __future__ import annotations

import pytest

from lightyear_node.protocol.events import Announced, Commit, Fetch, FetchFailed, Judge, Train
from lightyear_node.protocol.parameters import Cause, Phase
from lightyear_node.types import Reason, Round
from tests.support.barrier_bench import B, Bench, C, D, age, judge_in, memory, only, update


def with_a_known_peer(round: int = 3) -> Bench:
    """Collecting; B is known in its first generation."""
    return Bench(faulty_max=1).in_round(round, generations={B: age(0, 0)})


def one_round(bench: Bench, round: int, **generations: int) -> Judge:
    """All peers deliver, each in its generation."""
    peers = [update(peer, round, generations.get(peer, 0)) for peer in (B, C, D)]
    judge = judge_in(bench.delivered(*peers))
    bench.finished_round(judge)
    bench.sealed()
    return judge


def test_a_new_generation_counts_but_is_not_merged_for_two_rounds() -> None:
    bench = with_a_known_peer()
    refused = []
    for number in range(3, 7):
        judge = one_round(bench, number, b=1)
        assert judge.cause is Cause.ALL
        refused.append(judge.missing)
    assert refused == [((B, Reason.PROBATION),), ((B, Reason.PROBATION),), (), ()]


def test_the_first_known_generation_is_not_on_probation() -> None:
    bench = Bench(faulty_max=1).in_round(3)
    assert one_round(bench, 3, b=1_700_000_000).missing == ()


def test_every_new_generation_starts_a_new_probation() -> None:
    bench = with_a_known_peer()
    missing = [one_round(bench, number, b=number).missing for number in range(3, 8)]
    assert missing == [((B, Reason.PROBATION),)] * 5


def test_probation_survives_a_restart() -> None:
    bench = with_a_known_peer()
    bench.delivered(update(B, 3, generation=1), update(C, 3))
    judge = judge_in(bench.delivered(update(D, 3)))
    [commit] = only(Commit, bench.finished_round(judge))
    assert commit.memory.generations[B] == age(1, 5)
    again = bench.restarted(commit.memory)
    again.start()
    again.sealed()
    assert one_round(again, 4, b=1).missing == ((B, Reason.PROBATION),)
    assert one_round(again, 5, b=1).missing == ()


def test_updates_of_an_old_generation_stay_void_after_our_restart() -> None:
    bench = Bench(faulty_max=1).in_round(3, generations={B: age(1, 0)})
    assert only(Fetch, bench.tell(Announced(update(B, 3)))) == []
    assert bench.tell(Announced(update(B, 3, generation=1))) == [Fetch(update(B, 3, generation=1))]


def test_a_round_signed_again_in_a_new_generation_is_not_merged_by_sites_far_behind() -> None:
    """They learn of it rounds before they reach it; probation counts from the later round."""
    bench = Bench(faulty_max=1, remembers=memory(3, generations={B: age(0, 0)}))
    bench.start()
    bench.delivered(update(B, 10))
    bench.delivered(update(B, 10, generation=1), update(C, 10), update(D, 10))
    judge = judge_in(bench.sealed())
    assert (judge.round, judge.missing) == (10, ((B, Reason.PROBATION),))
    bench.finished_round(judge)
    bench.sealed()
    assert one_round(bench, 11, b=1).missing == ((B, Reason.PROBATION),)
    assert one_round(bench, 12, b=1).missing == ()


@pytest.mark.parametrize("peers", [(B, C), (B, C, D)])
def test_sites_on_probation_count_towards_min_peers(peers: tuple[str, ...]) -> None:
    """Otherwise probation, which ends after some rounds, could never end."""
    known = dict.fromkeys((B, C, D), age(0, 0))
    bench = Bench(faulty_max=1).in_round(3, generations=known)
    newly = dict.fromkeys(peers, 1)
    for number in (3, 4):
        judge = one_round(bench, number, **newly)
        assert [peer for peer, reason in judge.missing if reason is Reason.PROBATION] == [*peers]
    assert one_round(bench, 5, **newly).missing == ()
    assert bench.barrier.round == 6


def test_two_sites_on_probation_are_a_quorum_if_the_third_is_silent() -> None:
    known = dict.fromkeys((B, C, D), age(0, 0))
    bench = Bench(faulty_max=1).in_round(3, generations=known)
    bench.delivered(update(B, 3, generation=1), update(C, 3, generation=1))
    judge = judge_in(bench.wait(21, alive=[B, C]))
    assert judge.updates == ()
    assert Train(Round(4)) in bench.finished_round(judge)
    assert bench.phase is Phase.TRAINING


def test_a_new_generation_counts_for_the_supported_round() -> None:
    known = dict.fromkeys((B, C, D), age(0, 0))
    bench = Bench(faulty_max=1).in_round(3, generations=known)
    for ahead in (update(B, 9, generation=1), update(C, 9, generation=1)):
        assert bench.phase is Phase.COLLECTING
        commands = bench.tell(Announced(ahead), FetchFailed(ahead, Reason.TIMEOUT, retriable=False))
    judge = judge_in(commands)
    assert judge.cause is Cause.OVERTAKEN
    assert Train(Round(9)) in bench.finished_round(judge)
