"""What survives a crash: its form in the journal, and restarts at every persistence point."""

from __future__ import annotations

import json
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from lightyear_node.protocol.durable_state import Decision, DurableState
from lightyear_node.protocol.events import (
    Announce,
    Announced,
    Command,
    Commit,
    Decide,
    Greet,
    Merge,
    Merged,
    Seal,
    Train,
    Trained,
)
from lightyear_node.protocol.parameters import Cause, Phase
from lightyear_node.types import Digest, Generation, PeerName, Reason, Round, Update, Verdict
from tests.support.barrier_bench import (
    MODEL,
    US,
    B,
    Bench,
    C,
    D,
    E,
    age,
    judge_in,
    knowing,
    memory,
    only,
    update,
)

# Restarting at every persistence point.


def restarted(known: DurableState) -> tuple[Bench, list[Command]]:
    """A new process with the state from the journal."""
    plain = json.loads(json.dumps(known.to_plain()))
    assert DurableState.from_plain(plain) == known
    bench = Bench(peers=(B, C), remembers=DurableState.from_plain(plain))
    return bench, bench.start()


def test_restart_before_anything_is_sealed() -> None:
    _, commands = restarted(memory())
    assert commands == [Greet(), Train(Round(0)), Announce(None)]


def test_restart_after_sealing_announces_the_same_update() -> None:
    bench = Bench(peers=(B, C))
    bench.start()
    bench.tell(Announced(update(B, 7)))
    [seal] = only(Seal, bench.tell(Trained(Digest("x"))))
    bench, commands = restarted(seal.memory)
    assert commands == [Greet(), Announce(seal.update)]
    assert (bench.phase, bench.barrier.round) == (Phase.COLLECTING, 7)
    assert judge_in(bench.delivered(update(B, 7), update(C, 7))).round == 7


def test_restart_after_deciding_merges_the_same_decision() -> None:
    bench = Bench(peers=(B, C)).in_round(3)
    judge = judge_in(bench.delivered(update(B, 3), update(C, 3)))
    [decide] = only(Decide, bench.judged(judge))
    bench, commands = restarted(decide.memory)
    assert commands == [Greet(), Merge(decide.decision), Announce(update(US, 3))]
    [commit] = only(Commit, bench.tell(Merged(Round(3), MODEL)))
    assert commit.memory == memory(
        4,
        announced=update(US, 3),
        used={B: age(0, 3), C: age(0, 3)},
        **knowing(update(B, 3), update(C, 3)),
    )


def test_restart_after_committing_trains_the_next_round() -> None:
    bench = Bench(peers=(B, C)).in_round(3)
    judge = judge_in(bench.delivered(update(B, 3), update(C, 3)))
    [commit] = only(Commit, bench.finished_round(judge))
    bench, commands = restarted(commit.memory)
    assert commands == [Greet(), Train(Round(4)), Announce(update(US, 3))]


# The journal's plain form.

names = st.sampled_from([B, C, D, E])
numbers = st.integers(0, 2**62)
ages = st.builds(age, numbers, numbers)
digests = st.text(max_size=8).map(Digest)
floats = st.none() | st.floats(allow_nan=False)
updates = st.builds(Update, names, numbers.map(Generation), numbers.map(Round), digests)
verdicts = st.builds(
    Verdict,
    names,
    st.booleans(),
    st.sampled_from(Reason),
    score=floats,
    weight=st.floats(allow_nan=False),
    checks=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=2),
    digest=st.none() | digests,
)
decisions = st.builds(
    Decision,
    numbers.map(Round),
    st.sampled_from(Cause),
    st.text(max_size=20),
    st.lists(updates, max_size=3).map(tuple),
    st.lists(verdicts, max_size=3).map(tuple),
)
memories = st.builds(
    DurableState,
    generation=numbers.map(Generation),
    round=numbers.map(Round),
    announced=st.none() | updates,
    decision=st.none() | decisions,
    used=st.dictionaries(names, ages),
    recovering=st.booleans(),
    vouched=st.dictionaries(names, st.lists(updates, min_size=1, max_size=2).map(tuple)),
    generations=st.dictionaries(names, ages),
    quarantined=st.dictionaries(names, ages),
    unquarantined=st.dictionaries(names, ages),
    blocked=st.frozensets(names),
    paused=st.booleans(),
)


@given(memories)
def test_every_durable_state_survives_the_journal_unchanged(known: DurableState) -> None:
    assert DurableState.from_plain(json.loads(json.dumps(known.to_plain()))) == known


def test_every_field_of_the_durable_state_is_in_the_journal() -> None:
    names = {each.name for each in fields(DurableState)} - {"unquarantined"} | {"pardoned"}
    assert memory().to_plain().keys() == names


@given(memories)
def test_the_durable_state_of_an_earlier_version_can_be_read(known: DurableState) -> None:
    known_then = {"generation", "round", "announced", "decision", "used"}
    plain = {key: value for key, value in known.to_plain().items() if key in known_then}
    assert DurableState.from_plain(plain) == DurableState(
        known.generation, known.round, known.announced, known.decision, known.used
    )


def test_the_journal_lists_blocked_peers_in_order() -> None:
    peers = [PeerName(f"site {number}") for number in range(10)]
    assert memory(blocked=frozenset(peers)).to_plain()["blocked"] == peers
