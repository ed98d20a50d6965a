"""The referee reads journals: sound ones pass, and each contradiction is found under its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from lightyear_node.barrier import Terms
from lightyear_node.journal import Record
from lightyear_node.records import PeerName
from tests.sim.referee import InvariantBroken
from tests.sim.replay import replay

A, B, C = SITES = [PeerName(f"site-{letter}") for letter in "abc"]
AGREED = Terms(frozenset({B, C}), min_peers=2, faulty_max=0, rounds=1000)
Journals = dict[PeerName, list[list[Record]]]


def digest(site: PeerName, generation: int, round: int) -> str:
    return f"{site}:{generation}:{round}"


def update(site: PeerName, round: int, generation: int = 1, **changed: Any) -> dict[str, Any]:
    plain = {"peer": site, "generation": generation, "round": round}
    return {**plain, "digest": digest(site, generation, round), **changed}


def record(kind: str, round: int, lamport: int, body: Mapping[str, Any]) -> Record:
    return Record(lamport, 0, lamport, round, kind, body, "")


def seal(lamport: int, *told: Any, **changed: Any) -> Record:
    sealed = update(*told, **changed)
    return record("seal", sealed["round"], lamport, {"update": sealed})


def decision(lamport: int, round: int, accepted: list[dict[str, Any]], **changed: Any) -> Record:
    verdicts = [{"peer": one["peer"], "digest": one["digest"], "reason": "ok"} for one in accepted]
    plain = {"round": round, "cause": "all", "why": "", "accepted": accepted, "verdicts": verdicts}
    return record("decision", round, lamport, {**plain, **changed})


def commit(lamport: int, round: int) -> Record:
    return record("commit", round, lamport, {"model": "m", "metrics": {}})


def history(site: PeerName, rounds: int = 3) -> Iterator[Record]:
    """A site that has merged both others in every round; the stamps of a round are a hundred's."""
    others = [other for other in SITES if other != site]
    yield record("start", 0, 1, {})
    for round in range(rounds):
        stamp = 100 * (round + 1)
        yield seal(stamp + 1, site, round)
        yield decision(stamp + 50, round, [update(other, round) for other in others])
        yield commit(stamp + 60, round)


def sound() -> Journals:
    return {site: [list(history(site))] for site in SITES}


def replaced(kind: str, round: int, by: list[Record]) -> Journals:
    """What all three tell, but for one record of site-a."""
    journals = sound()
    journals[A] = [
        [
            new
            for old in journals[A][0]
            for new in (by if (old.kind, old.round) == (kind, round) else [old])
        ]
    ]
    return journals


def test_sound_journals_pass() -> None:
    referee = replay(AGREED, sound())
    assert referee.counts["commits"] == 9
    assert referee.counts["merged updates"] == 18


BOTH = decision(250, 1, [update(B, 1), update(C, 1)])
BOTH_JUDGED = BOTH.body["verdicts"]

PLANTED = {
    "two digests for a round": (
        replaced("seal", 1, [seal(201, A, 1), seal(202, A, 1, digest="another")]),
        "S1",
    ),
    "a round that goes back": (replaced("commit", 2, [commit(360, 0)]), "S2"),
    "a round committed twice": (replaced("commit", 2, [commit(360, 2), commit(361, 2)]), "S2"),
    "an update that nobody sealed": (
        replaced("decision", 1, [decision(250, 1, [update(B, 1, digest="x"), update(C, 1)])]),
        "S3",
    ),
    "a stamp that goes back": (replaced("decision", 1, [decision(102, 1, [])]), "Lamport's order"),
    "an update of the future": (
        replaced("decision", 1, [decision(250, 1, [update(B, 2), update(C, 1)])]),
        "S3",
    ),
    "one peer twice in a round": (
        replaced("decision", 1, [decision(250, 1, [update(B, 1), update(B, 1)])]),
        "S3",
    ),
    "its own update as another's": (
        replaced("decision", 1, [decision(250, 1, [update(A, 1), update(B, 1)])]),
        "S3",
    ),
    "a seal in another's name": (replaced("seal", 1, [seal(201, B, 1)]), "S3"),
    "an update that is too old": (
        replaced("decision", 1, [decision(250, 1, [update(B, 0), update(C, 1)])]),
        "S4",
    ),
    "a commit without a decision": (replaced("decision", 1, []), "S5"),
    "two decisions of a round": (
        replaced("decision", 1, [BOTH, decision(251, 1, [update(B, 1)], verdicts=BOTH_JUDGED)]),
        "S5",
    ),
    "a decision of a round that it has not sealed": (replaced("seal", 1, []), "S5"),
    "a round that nobody has reached": (replaced("seal", 2, [seal(301, A, 9)]), "S6"),
    "a round that the others have not reached": (
        replaced("decision", 0, []) | {A: [[seal(101, A, 0), seal(102, A, 1)]]},
        "S10",
    ),
    "a round closed by too few": (
        replaced("decision", 1, [decision(250, 1, [update(B, 1)])]),
        "S10",
    ),
}


@pytest.mark.parametrize(("journals", "invariant"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_contradiction_is_found(journals: Journals, invariant: str) -> None:
    with pytest.raises(InvariantBroken) as found:
        replay(AGREED, journals)
    assert found.value.invariant == invariant


def test_an_update_merged_again_in_a_later_round_is_found() -> None:
    """Possible only with an update that is newer than the first of both rounds."""
    journals = sound()
    again = [update(B, 1), update(C, 1)]
    records = [seal(101, A, 0), decision(250, 0, again), commit(260, 0)]
    records += [seal(261, A, 1), decision(270, 1, again), commit(280, 1)]
    journals[A] = [records]
    # The others have not needed site-a for what they merged.
    agreed = replace(AGREED, min_peers=1)
    for other, peer in ((B, C), (C, B)):
        journals[other] = [
            [
                one
                for round in range(2)
                for one in (
                    seal(100 * round + 101, other, round),
                    decision(100 * round + 150, round, [update(peer, round)]),
                    commit(100 * round + 160, round),
                )
            ]
        ]
    with pytest.raises(InvariantBroken, match="S4b is broken"):
        replay(agreed, journals)


def second_disk(first: int, generation: int) -> list[Record]:
    """Site-c after losing its disk in round 1: it merges what it may have merged before."""
    begun = [record("start", 0, 1, {}), seal(270, C, first, generation)]
    merged = [update(A, 1), update(B, 1)]
    return [*begun, decision(280, first, merged if first <= 1 else []), commit(290, first)]


def test_a_new_disk_begins_a_new_history_and_not_a_new_story() -> None:
    told = [list(history(C, rounds=2)), second_disk(1, generation=5)]
    others = {site: [list(history(site, rounds=2))] for site in (A, B)}
    replay(AGREED, {**others, C: told})
    lying = [told[0], second_disk(1, generation=1)]
    lying[1][1] = seal(270, C, 1, digest="another")
    with pytest.raises(InvariantBroken, match="S1 is broken"):
        replay(AGREED, {**others, C: lying})


def test_of_sites_without_a_journal_anything_is_believed() -> None:
    journals = sound()
    del journals[C]
    replay(AGREED, journals)
