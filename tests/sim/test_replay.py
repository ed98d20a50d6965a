"""The invariant checker reads journals: valid ones pass, each planted violation is found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from lightyear_node.protocol.parameters import Parameters
from lightyear_node.storage.hash_chain import Record
from lightyear_node.types import PeerName
from tests.sim.invariant_checker import InvariantBroken
from tests.sim.replay import replay

A, B, C = SITES = [PeerName(f"site-{letter}") for letter in "abc"]
PARAMETERS = Parameters(frozenset({B, C}), min_peers=2, faulty_max=0, rounds=1000)
Journals = dict[PeerName, list[list[Record]]]


def digest(site: PeerName, generation: int, round: int) -> str:
    return f"{site}:{generation}:{round}"


def update(site: PeerName, round: int, generation: int = 1, **changed: Any) -> dict[str, Any]:
    plain = {"peer": site, "generation": generation, "round": round}
    return {**plain, "digest": digest(site, generation, round), **changed}


def record(kind: str, round: int, time: int, body: Mapping[str, Any]) -> Record:
    return Record(time, time, time, round, kind, body, "")


def seal(time: int, *fields: Any, **changed: Any) -> Record:
    sealed = update(*fields, **changed)
    return record("seal", sealed["round"], time, {"update": sealed})


def decision(time: int, round: int, accepted: list[dict[str, Any]], **changed: Any) -> Record:
    verdicts = [{"peer": one["peer"], "digest": one["digest"], "reason": "ok"} for one in accepted]
    plain = {"round": round, "cause": "all", "why": "", "accepted": accepted, "verdicts": verdicts}
    return record("decision", round, time, {**plain, **changed})


def commit(time: int, round: int) -> Record:
    return record("commit", round, time, {"model": "m", "metrics": {}})


def history(site: PeerName, rounds: int = 3) -> Iterator[Record]:
    """A site that merges both others in every round; each round has its own hundred of times."""
    others = [other for other in SITES if other != site]
    yield record("start", 0, 1, {})
    for round in range(rounds):
        time = 100 * (round + 1)
        yield seal(time + 1, site, round)
        yield decision(time + 50, round, [update(other, round) for other in others])
        yield commit(time + 60, round)


def valid() -> Journals:
    return {site: [list(history(site))] for site in SITES}


def replaced(kind: str, round: int, by: list[Record]) -> Journals:
    """Valid journals with one record of site-a replaced."""
    journals = valid()
    journals[A] = [
        [
            new
            for old in journals[A][0]
            for new in (by if (old.kind, old.round) == (kind, round) else [old])
        ]
    ]
    return journals


def test_valid_journals_pass() -> None:
    checker = replay(PARAMETERS, valid())
    assert checker.counts["commits"] == 9
    assert checker.counts["merged updates"] == 18


BOTH = decision(250, 1, [update(B, 1), update(C, 1)])
BOTH_JUDGED = BOTH.body["verdicts"]

PLANTED = {
    "two digests for a round": (
        replaced("seal", 1, [seal(201, A, 1), seal(202, A, 1, digest="another")]),
        "S1",
    ),
    "a round that goes back": (replaced("commit", 2, [commit(360, 0)]), "S2"),
    "a round committed twice": (replaced("commit", 2, [commit(360, 2), commit(361, 2)]), "S2"),
    "an update that no site sealed": (
        replaced("decision", 1, [decision(250, 1, [update(B, 1, digest="x"), update(C, 1)])]),
        "S3",
    ),
    "a time that goes back": (replaced("decision", 1, [decision(102, 1, [])]), "time"),
    "an update of the future": (
        replaced("decision", 1, [decision(250, 1, [update(B, 2), update(C, 1)])]),
        "S3",
    ),
    "one peer twice in a round": (
        replaced("decision", 1, [decision(250, 1, [update(B, 1), update(B, 1)])]),
        "S3",
    ),
    "its own update as a peer's": (
        replaced("decision", 1, [decision(250, 1, [update(A, 1), update(B, 1)])]),
        "S3",
    ),
    "a seal in another site's name": (replaced("seal", 1, [seal(201, B, 1)]), "S3"),
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
    "a round that no site has reached": (replaced("seal", 2, [seal(301, A, 9)]), "S6"),
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
        replay(PARAMETERS, journals)
    assert found.value.invariant == invariant


def test_an_update_merged_again_in_a_later_round_is_found() -> None:
    """Possible only with an update that is newer than the first of the two rounds."""
    journals = valid()
    again = [update(B, 1), update(C, 1)]
    records = [seal(101, A, 0), decision(250, 0, again), commit(260, 0)]
    records += [seal(261, A, 1), decision(270, 1, again), commit(280, 1)]
    journals[A] = [records]
    # The others did not need site-a for what they merged.
    parameters = replace(PARAMETERS, min_peers=1)
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
        replay(parameters, journals)


def second_disk(first: int, generation: int) -> list[Record]:
    """Site-c after losing its disk in round 1: it merges what it may have merged before."""
    begun = [record("start", 0, 1, {}), seal(270, C, first, generation)]
    merged = [update(A, 1), update(B, 1)]
    return [*begun, decision(280, first, merged if first <= 1 else []), commit(290, first)]


def test_a_new_disk_begins_a_new_history_but_may_not_sign_a_round_again() -> None:
    journals = [list(history(C, rounds=2)), second_disk(1, generation=5)]
    others = {site: [list(history(site, rounds=2))] for site in (A, B)}
    replay(PARAMETERS, {**others, C: journals})
    equivocating = [journals[0], second_disk(1, generation=1)]
    equivocating[1][1] = seal(270, C, 1, digest="another")
    with pytest.raises(InvariantBroken, match="S1 is broken"):
        replay(PARAMETERS, {**others, C: equivocating})


def test_sites_without_a_journal_may_have_signed_anything() -> None:
    journals = valid()
    del journals[C]
    replay(PARAMETERS, journals)
