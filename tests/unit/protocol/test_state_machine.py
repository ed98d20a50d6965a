"""The state machine: start, tags, refused events, status texts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightyear_node.errors import BarrierMisuse
from lightyear_node.protocol.events import (
    Announce,
    Announced,
    Answered,
    Blocked,
    Event,
    Fetch,
    Fetched,
    Greet,
    Heard,
    Judged,
    Merged,
    Note,
    Seal,
    Sealed,
    Tick,
    Train,
    Trained,
)
from lightyear_node.protocol.parameters import (
    Phase,
    admissible_min_peers,
    default_faulty_max,
    default_min_peers,
)
from lightyear_node.protocol.state_machine import Barrier
from lightyear_node.types import Digest, Generation, PeerName, Reason, Round, Update, Verdict
from tests.support.barrier_bench import MODEL, US, B, Bench, C, D, judge_in, memory, only, update

# Parameters.


@pytest.mark.parametrize(
    ("sites", "faulty_max", "admissible"),
    [
        (1, 0, []),
        (2, 0, [1]),
        (3, 0, [1, 2]),
        (3, 1, []),
        (4, 0, [1, 2, 3]),
        (4, 1, [2]),
        (5, 1, [2, 3]),
        (6, 2, []),
        (7, 2, [4]),
        (10, 3, [6]),
        (10, 2, [4, 5, 6, 7]),
        (4, -1, []),
    ],
)
def test_admissible_min_peers(sites: int, faulty_max: int, admissible: list[int]) -> None:
    assert list(admissible_min_peers(sites, faulty_max)) == admissible


@pytest.mark.parametrize("sites", range(2, 65))
def test_the_defaults_are_admissible(sites: int) -> None:
    faulty_max = default_faulty_max(sites)
    assert faulty_max == (1 if sites >= 4 else 0)
    chosen = default_min_peers(sites, faulty_max)
    assert chosen in admissible_min_peers(sites, faulty_max)
    assert chosen == max(math.ceil((sites - 1) / 2), admissible_min_peers(sites, faulty_max)[0])


def test_too_few_sites_have_no_default() -> None:
    with pytest.raises(ValueError, match="3 sites cannot tolerate 1"):
        default_min_peers(3, 1)


@pytest.mark.parametrize(("min_peers", "faulty_max"), [(0, 0), (4, 0), (1, 1), (3, 1), (2, 2)])
def test_a_barrier_refuses_parameters_that_could_block_or_drift(
    min_peers: int, faulty_max: int
) -> None:
    with pytest.raises(BarrierMisuse, match="min_peers"):
        Bench(min_peers=min_peers, faulty_max=faulty_max)


@pytest.mark.parametrize(("min_peers", "faulty_max"), [(1, 0), (0, 1), (0, -1), (-1, 0)])
def test_without_peers_min_peers_and_faulty_max_must_be_0(min_peers: int, faulty_max: int) -> None:
    with pytest.raises(BarrierMisuse, match="min_peers"):
        Bench(peers=(), min_peers=min_peers, faulty_max=faulty_max)


def test_a_site_cannot_be_its_own_peer() -> None:
    with pytest.raises(BarrierMisuse, match="own peer"):
        Bench(peers=(US, B, C))


# Observing.


def test_training_begins_when_all_peers_have_answered() -> None:
    bench = Bench()
    assert bench.start(answering=False) == [Greet()]
    assert bench.tell(Answered(B), Answered(B), Answered(C), Heard(D)) == []
    assert bench.phase is Phase.OBSERVING
    assert bench.tell(Answered(D)) == [Train(Round(0)), Announce(None)]


def test_observing_ends_after_its_timeout() -> None:
    bench = Bench()
    bench.start(answering=False)
    assert bench.wait(4.5) == []
    assert bench.wait(0.5) == [Train(Round(0)), Announce(None)]


def test_nothing_is_announced_or_fetched_before_observing_ends() -> None:
    bench = Bench(remembers=memory(3, announced=update(US, 3)))
    bench.start(answering=False)
    assert bench.tell(Announced(update(B, 3))) == []
    [note, *commands] = bench.tell(Answered(B), Answered(C), Answered(D))
    assert isinstance(note, Note)
    assert commands == [Announce(update(US, 3)), Fetch(update(B, 3))]


def test_greetings_are_repeated_while_observing() -> None:
    bench = Bench()
    bench.parameters = replace(bench.parameters, observe_s=12.0)
    bench.barrier = Barrier(US, bench.parameters, memory())
    bench.start(answering=False)
    assert bench.wait(11.5) == [Greet(), Greet()]


def test_blocked_peers_need_not_answer() -> None:
    bench = Bench(blocked=[D])
    bench.start(answering=False)
    assert Train(Round(0)) in bench.tell(Answered(B), Answered(C))


# Sealing and the tag.


def test_an_update_is_announced_only_when_it_is_durable() -> None:
    bench = Bench()
    bench.start()
    ours = Update(US, Generation(0), Round(0), Digest("x"))
    assert bench.tell(Trained(Digest("x"))) == [Seal(ours, memory(announced=ours))]
    assert only(Announce, bench.wait(20)) == [Announce(None)] * 4
    assert bench.tell(Sealed(ours)) == [Announce(ours)]


def test_the_announcement_is_repeated_with_every_heartbeat() -> None:
    bench = Bench()
    bench.start()
    bench.sealed()
    ours = bench.barrier.announced
    assert only(Announce, bench.wait(15)) == [Announce(ours)] * 3


def test_the_tag_is_chosen_when_training_ends() -> None:
    bench = Bench(faulty_max=1)
    bench.start()
    assert bench.barrier.round == 0
    bench.tell(Announced(update(B, 7)), Announced(update(C, 9)))
    [seal, *_] = bench.tell(Trained(Digest("x")))
    assert isinstance(seal, Seal)
    assert seal.update.round == 7
    assert (seal.memory.round, seal.memory.announced) == (7, seal.update)


@pytest.mark.parametrize(
    ("faulty_max", "rounds", "tag"),
    [
        (0, {}, 0),
        (0, {B: 5}, 5),
        (1, {B: 5}, 0),
        (1, {B: 10**9}, 0),
        (1, {B: 10**9, C: 4}, 4),
        (1, {B: 10**9, C: 4, D: 6}, 6),
    ],
)
def test_only_more_peers_than_faulty_max_advance_the_round(
    faulty_max: int, rounds: dict[PeerName, int], tag: int
) -> None:
    bench = Bench(faulty_max=faulty_max, rounds=2 * 10**9)
    bench.start()
    bench.tell(*(Announced(update(peer, reached)) for peer, reached in rounds.items()))
    bench.sealed()
    assert bench.barrier.round == tag


def test_one_faulty_peer_does_not_advance_the_round() -> None:
    bench = Bench(faulty_max=1).in_round(5)
    for lie in range(20):
        bench.tell(Announced(update(B, 10**9 + lie, generation=lie)))
    bench.wait(300, alive=[B])
    assert (bench.phase, bench.barrier.round) == (Phase.COLLECTING, 5)


def test_blocked_peers_do_not_advance_the_round() -> None:
    bench = Bench(faulty_max=1, blocked=[C])
    bench.start()
    bench.tell(Announced(update(B, 7)), Announced(update(C, 9)))
    bench.sealed()
    assert bench.barrier.round == 0


def test_a_late_site_trains_for_the_supported_round() -> None:
    bench = Bench()
    bench.start(answering=False)
    bench.tell(Announced(update(B, 40)))
    assert Train(Round(40)) in bench.tell(Answered(B), Answered(C), Answered(D))


def test_a_tag_is_never_used_twice() -> None:
    # The durable round is below our last tag, as after a jump.
    bench = Bench(remembers=memory(3, announced=update(US, 8)))
    bench.start()
    bench.sealed()
    assert bench.barrier.round == 9


@pytest.mark.parametrize("claimed", [-1, 2**62 + 1])
def test_impossible_rounds_are_ignored(claimed: int) -> None:
    bench = Bench(rounds=2**63)
    bench.start()
    bench.tell(Heard(B))
    before = bench.state
    bench.tell(Announced(update(B, claimed)))
    assert bench.state == before


def test_the_highest_possible_round_is_not_impossible() -> None:
    bench = Bench(rounds=2**63)
    bench.start()
    assert bench.tell(Announced(update(B, 2**62))) == [Fetch(update(B, 2**62))]


def test_non_members_are_ignored() -> None:
    bench = Bench().in_round(0)
    before = bench.state
    stranger = update(PeerName("x"), 0)
    ourselves = update(US, 9)
    events = (Heard(stranger.peer), Answered(stranger.peer), Fetched(stranger))
    assert bench.tell(*events, Announced(stranger), Announced(ourselves)) == []
    assert bench.state == before


# Refused events.


@pytest.mark.parametrize(
    "event",
    [
        Trained(Digest("x")),
        Sealed(update(US, 3)),
        Judged(Round(3), ()),
        Merged(Round(3), MODEL),
    ],
)
def test_an_impossible_event_is_refused_and_changes_nothing(event: Event) -> None:
    bench = Bench().in_round(3)
    bench.delivered(update(B, 3))
    before = bench.state
    bench.now += 100
    with pytest.raises(BarrierMisuse, match="while collecting in round 3"):
        bench.tell(event)
    assert bench.state == before


@pytest.mark.parametrize(
    "judged",
    [
        Judged(Round(2), ()),
        Judged(Round(3), (Verdict(D, True, Reason.OK),)),
        Judged(Round(3), (Verdict(B, True, Reason.OK), Verdict(B, False, Reason.UNSCORED))),
    ],
)
def test_verdicts_on_other_updates_are_refused(judged: Judged) -> None:
    bench = Bench().in_round(3)
    bench.delivered(update(B, 3), update(C, 3))
    judge_in(bench.wait(20.5))
    before = bench.state
    with pytest.raises(BarrierMisuse, match="while judging"):
        bench.tell(judged)
    assert bench.state == before


@pytest.mark.parametrize("round", [2, 4])
def test_merging_another_round_than_decided_is_refused(round: int) -> None:
    bench = Bench(peers=(B, C)).in_round(3)
    bench.judged(judge_in(bench.delivered(update(B, 3), update(C, 3))))
    with pytest.raises(BarrierMisuse, match="while merging"):
        bench.tell(Merged(Round(round), MODEL))


def test_another_update_than_the_one_to_seal_is_refused() -> None:
    bench = Bench()
    bench.start()
    bench.tell(Trained(Digest("x")))
    with pytest.raises(BarrierMisuse, match="while sealing"):
        bench.tell(Sealed(update(US, 0)))


def test_a_barrier_accepts_no_event_before_its_only_start() -> None:
    bench = Bench()
    with pytest.raises(BarrierMisuse, match="while observing"):
        bench.tell(Tick())
    bench.start()
    with pytest.raises(BarrierMisuse, match="twice"):
        bench.start()


# Status texts, and what the store must keep.


def test_the_status_text_of_every_phase() -> None:
    bench = Bench(peers=(B, C, D), min_peers=1, rounds=1)
    texts: list[str] = []

    def note_text() -> None:
        texts.append(bench.barrier.waiting_for(bench.now))

    bench.start(answering=False)
    bench.tell(Answered(B))
    note_text()
    bench.tell(Answered(C), Answered(D))
    note_text()
    [seal] = only(Seal, bench.tell(Trained(Digest("x"))))
    note_text()
    bench.tell(Sealed(seal.update))
    note_text()
    bench.delivered(update(B, 0))
    bench.wait(18, alive=[C, D])
    note_text()
    judge = judge_in(bench.delivered(update(C, 0)) + bench.wait(12, alive=[D]))
    note_text()
    bench.judged(judge)
    note_text()
    bench.tell(Merged(Round(0), MODEL))
    note_text()
    assert texts == [
        "looking for the other sites (1 of 3 have answered)",
        "round 0: training",
        "round 0: storing our update",
        "round 0: waiting for b, c and d (0 of at least 1 update here)",
        "round 0: waiting for c and d (1 of at least 1 update here; closing in 12 s)",
        "round 0: judging 2 updates",
        "round 0: merging 2 updates",
        "finished: 1 round done, still serving our last update",
    ]


def test_the_status_text_if_too_few_sites_are_left() -> None:
    bench = Bench().in_round(0)
    bench.delivered(update(B, 0))
    bench.tell(Blocked(frozenset({C, D})))
    assert bench.barrier.waiting_for(bench.now) == (
        "round 0: too few sites are left to wait for (1 of at least 2 updates here)"
    )


def test_updates_in_use_are_kept() -> None:
    bench = Bench(peers=(B, C)).in_round(3)
    ours, old, new, coming = update(US, 3), update(B, 3), update(B, 4), update(C, 3)
    bench.delivered(old)
    bench.tell(Announced(coming))
    assert bench.barrier.kept() == {ours.digest, old.digest, coming.digest}
    judge = judge_in(bench.tell(Fetched(coming)))
    bench.judged(judge)
    assert bench.barrier.kept() == {ours.digest, old.digest, coming.digest}
    bench.tell(Merged(Round(3), MODEL))
    assert bench.barrier.kept() == {ours.digest}
    bench.tell(Announced(new))
    assert bench.barrier.kept() == {ours.digest, new.digest}
    [seal] = only(Seal, bench.tell(Trained(Digest("next"))))
    assert seal.update.digest in bench.barrier.kept()


def test_updates_being_judged_or_merged_are_kept() -> None:
    bench = Bench(peers=(B, C)).in_round(3)
    judge = judge_in(bench.delivered(update(B, 3), update(C, 3)))
    bench.tell(Announced(update(B, 1, generation=1)))  # voids what we hold of it
    expected = {update(peer, 3).digest for peer in (US, B, C)}
    assert bench.barrier.kept() == expected
    bench.judged(judge)
    assert bench.barrier.kept() == expected
