"""What survives a crash: how the journal writes it, and restarts at every persistence point."""

from __future__ import annotations

import json
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from lightyear_node.barrier import (
    Announce,
    Announced,
    Cause,
    Command,
    Commit,
    Decide,
    Decision,
    Greet,
    Memory,
    Merge,
    Merged,
    Phase,
    Seal,
    Train,
    Trained,
)
from lightyear_node.records import Digest, Generation, Reason, Round, Update, Verdict
from tests.unit.barrier_bench import (
    MODEL,
    US,
    B,
    Bench,
    C,
    D,
    E,
    age,
    heard_of,
    judge_in,
    memory,
    only,
    update,
)

# Restarting at every persistence point.


def restarted(known: Memory) -> tuple[Bench, list[Command]]:
    """A new process, with what the journal gives back."""
    plain = json.loads(json.dumps(known.to_plain()))
    assert Memory.from_plain(plain) == known
    bench = Bench(peers=(B, C), remembers=Memory.from_plain(plain))
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
        **heard_of(update(B, 3), update(C, 3)),
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
    Memory,
    generation=numbers.map(Generation),
    round=numbers.map(Round),
    announced=st.none() | updates,
    decision=st.none() | decisions,
    used=st.dictionaries(names, ages),
    recovering=st.booleans(),
    vouched=st.dictionaries(names, st.lists(updates, min_size=1, max_size=2).map(tuple)),
    generations=st.dictionaries(names, ages),
    quarantined=st.dictionaries(names, ages),
    pardoned=st.dictionaries(names, ages),
    blocked=st.frozensets(names),
    paused=st.booleans(),
)


@given(memories)
def test_every_memory_comes_back_from_the_journal_as_it_was(known: Memory) -> None:
    assert Memory.from_plain(json.loads(json.dumps(known.to_plain()))) == known


def test_no_field_of_the_memory_is_left_out_of_the_journal() -> None:
    assert memory().to_plain().keys() == {each.name for each in fields(Memory)}


@given(memories)
def test_the_memory_of_an_earlier_version_is_understood(known: Memory) -> None:
    known_then = {"generation", "round", "announced", "decision", "used"}
    plain = {key: value for key, value in known.to_plain().items() if key in known_then}
    assert Memory.from_plain(plain) == Memory(
        known.generation, known.round, known.announced, known.decision, known.used
    )
