"""Counts of verdicts, and the JSON of `demo`."""

from __future__ import annotations

import json
from dataclasses import replace

from lightyear_node.lab.demo_results import PeerJudgement, judgements_of, latest
from lightyear_node.types import PeerName
from tests.support.staged_demo import MakeResults, rounds_of

A, B, C = (PeerName(f"site-{letter}") for letter in "abc")


def test_every_site_judges_every_other_and_the_bad_ones_judge_too(
    make_results: MakeResults,
) -> None:
    # 4 sites, 1 bad, 3 rounds: each honest one is judged by 3 others, so is the bad one.
    counts = make_results().verdict_counts()
    assert counts == {
        "honest_accepted": 3 * 3 * 3,
        "honest_rejected": 0,
        "malfunctioning_accepted": 0,
        "malfunctioning_rejected": 3 * 3,
    }


def test_an_update_that_did_not_arrive_is_not_counted(make_results: MakeResults) -> None:
    results = make_results()
    gone = [replace(one, delivered=False, accepted=False) for one in results.judgements]
    assert sum(replace(results, judgements=gone).verdict_counts().values()) == 0
    assert replace(results, judgements=gone).last_round() == {}


def test_means_are_over_honest_sites_only(make_results: MakeResults) -> None:
    results = make_results(alone=0.8, federated=0.9, averaged=0.3)
    means = (results.honest_alone, results.honest_federated, results.everyone_averaged)
    assert [round(mean, 6) for mean in means] == [0.8, 0.9, 0.3]


def test_the_json_has_exactly_these_keys(make_results: MakeResults) -> None:
    plain = json.loads(json.dumps(make_results().to_plain()))
    assert list(plain) == [
        "federation",
        "rounds",
        "sites",
        "everyone_averaged",
        "verdicts",
        "bytes",
        "report",
    ]
    assert plain["sites"][0] == {
        "name": "site-a",
        "malfunctioning": False,
        "metric_alone": 0.8,
        "metric_federated": 0.9,
    }
    assert [site["malfunctioning"] for site in plain["sites"]] == [False, False, False, True]
    assert plain["bytes"] == {"raw": 2_000_000, "wire": 1_500_000}


def test_a_nodes_history_becomes_judgements() -> None:
    history = rounds_of([B, C], rounds=2, bad=[C])
    history[1]["verdicts"][0] |= {"digest": None, "accepted": False, "reason": "unreachable"}
    judged = judgements_of(A, history)
    assert [(one.round, one.peer, one.accepted, one.delivered) for one in judged] == [
        (0, B, True, True),
        (0, C, False, True),
        (1, B, False, False),
        (1, C, False, True),
    ]
    assert {one.judge for one in judged} == {A}


def test_the_latest_verdict_is_that_of_the_highest_round_in_any_order() -> None:
    early = PeerJudgement(1, A, B, False, "too_far", 0.4, True)
    late = PeerJudgement(2, A, B, True, "ok", 0.9, True)
    missing = PeerJudgement(3, A, B, False, "timeout", None, False)
    for order in ([early, late, missing], [missing, late, early]):
        assert latest(order) == {(A, B): late}
