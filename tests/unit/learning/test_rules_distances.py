"""Distance-based baselines and those that accept all or none, compared with values by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from lightyear_node.lab.corrupted_updates import corrupt
from lightyear_node.learning import Candidate, make_rule
from lightyear_node.learning.rules import FedAvg, RoundContext, Rule
from lightyear_node.types import PeerName, Reason, Round
from tests.support.short_vectors import NO_VALIDATION, reasons, run, site


def on_a_line(*positions: float) -> dict[str, list[float]]:
    return {f"p{index}": [position, 0.0] for index, position in enumerate(positions, start=1)}


# Krum.


def test_krum_selects_the_lowest_score() -> None:
    """n = 5, f = 1, two nearest.  0: 1 + 4; 1: 1 + 1; 2: 1 + 4; 10: 1 + 64; 11: 1 + 81"""
    verdicts, after = run("krum", [0, 0], on_a_line(1, 2, 10, 11))
    assert [v.checks["krum_score"] for v in verdicts.values()] == [2, 5, 65, 82]
    assert [v.checks["distance"] for v in verdicts.values()] == [1, 2, 10, 11]
    assert [v.checks["limit"] for v in verdicts.values()] == [2] * 4
    assert reasons(verdicts) == {
        "p1": Reason.OK, "p2": Reason.NOT_SELECTED, "p3": Reason.NOT_SELECTED,
        "p4": Reason.NOT_SELECTED,
    }  # fmt: skip
    assert [v.weight for v in verdicts.values()] == [1, 0, 0, 0]
    assert after == [1, 0]


def test_krum_squares_its_distances() -> None:
    """Squared: 37, 26, 34, 25, 65, so 9 wins; plain distances: 7, 6, 8, 7, 11 would choose 1."""
    verdicts, after = run("krum", [0, 0], on_a_line(1, 6, 9, 13))
    assert [v.checks["krum_score"] for v in verdicts.values()] == [26, 34, 25, 65]
    assert after == [9, 0]


def test_krum_assumes_fewer_faulty_than_half_of_n_minus_two() -> None:
    """n = 6: f = 1 and three nearest: 35, 21, 17, 45, 131, 165, so 3 wins.  With f = n//2 only the
    nearest would count and 0 or 1 would win; with four nearest (f = 0), 5."""
    peers = on_a_line(1, 3, 5, 12, 13)
    verdicts, after = run("krum", [0, 0], peers)
    assert [v.checks["krum_score"] for v in verdicts.values()] == [21, 17, 45, 131, 165]
    assert after == [3, 0]
    assert run("krum", [0, 0], peers, faulty=1)[1] == [3, 0]
    assert run("krum", [0, 0], peers, faulty=0)[1] == [5, 0]


@pytest.mark.parametrize(
    ("peers", "faulty", "works"),
    [(1, None, False), (2, None, True), (2, 0, True), (1, 0, False), (3, 1, False), (4, 1, True)],
)
def test_krum_without_enough_models_keeps_ours(peers: int, faulty: int | None, works: bool) -> None:
    verdicts, after = run("krum", [100, 0], on_a_line(*range(peers)), faulty=faulty)
    assert set(reasons(verdicts).values()) == (
        {Reason.OK, Reason.NOT_SELECTED} if works else {Reason.NOT_SELECTED}
    )
    assert (after == [100, 0]) is not works


def test_krum_may_choose_our_own_model() -> None:
    verdicts, after = run("krum", [1, 0], on_a_line(0, 2, 10, 11))
    assert set(reasons(verdicts).values()) == {Reason.NOT_SELECTED}
    assert after == [1, 0]
    twins, _ = run("krum", [1, 0], on_a_line(1, 1, 1, 1))
    assert set(reasons(twins).values()) == {Reason.NOT_SELECTED}  # our own model wins ties


def test_krum_copies_the_selected_model_bit_for_bit() -> None:
    """θ_i + 1·(θ_j − θ_i) would lose the small value next to the large one."""
    _, after = run("krum", [1e20, 0], {"a": [0.1, 0.7], "b": [0.1, 0.7], "c": [0.3, 0.7]})
    assert after == [0.1, 0.7]


# FedProx and Ditto: differ from FedAvg only in training.


def test_fedprox_and_ditto_judge_as_fedavg_does() -> None:
    own, peers = site("us", [1, 2], 10), [site("a", [3, 4], 30), site("b", [-1, -2], 60)]
    plain = FedAvg().judge(own, peers, NO_VALIDATION, RoundContext(Round(0)))
    assert [v.weight for v in plain.verdicts] == [0.3, 0.6]
    for name in ("fedprox", "ditto"):
        assert make_rule(name).judge(own, peers, NO_VALIDATION, RoundContext(Round(0))) == plain


def test_proximal_and_personal_strengths() -> None:
    def strengths(name: str, **options: Any) -> tuple[float, float]:
        rule = make_rule(name, options)
        return rule.proximal_strength, rule.personal_strength

    assert strengths("fedprox") == (0.01, 0)
    assert strengths("fedprox", mu=1) == (1, 0)
    assert strengths("ditto") == (0, 0.1)
    assert strengths("ditto", lam=2) == (0, 2)
    for name in ("lightyear", "fedavg", "krum", "afa", "asmr", "cfl", "balance", "scclip", "local"):
        assert strengths(name) == (0, 0)


# BALANCE.


PEERS = {"a": [4.0, 4.0], "b": [4.5, 4.0], "c": [4.6, 4.0]}  # 1, 1.5 and 1.6 from (3, 4)


@pytest.mark.parametrize(
    ("context", "limit", "accepted"),
    [
        (RoundContext(Round(0), 10), 1.5, ["a", "b"]),
        (RoundContext(Round(4), 10), 1.5 * math.exp(-0.4), ["a"]),
        (RoundContext(Round(5), 10), 1.5 * math.exp(-0.5), []),
        (RoundContext(Round(5), None), 1.5, ["a", "b"]),
    ],
)
def test_balance_accepts_models_within_the_limit(
    context: RoundContext, limit: float, accepted: list[str]
) -> None:
    """‖w_i‖ = 5, so γ·‖w_i‖ = 1.5; equality is enough."""
    verdicts, after = run("balance", [3, 4], PEERS, context)
    assert [name for name, v in verdicts.items() if v.accepted] == accepted
    assert [v.checks["distance"] for v in verdicts.values()] == pytest.approx([1, 1.5, 1.6])
    assert [v.checks["limit"] for v in verdicts.values()] == pytest.approx([limit] * 3)
    assert reasons(verdicts)["c"] is Reason.TOO_FAR
    mean = np.mean([PEERS[name] for name in accepted] or [[3, 4]], axis=0)
    assert after == pytest.approx(list(0.5 * np.array([3, 4]) + 0.5 * mean))


def test_balance_without_near_peers_keeps_our_model() -> None:
    for peers in ({"c": [9.0, 9.0]}, {}):
        _, after = run("balance", [3, 4], peers)
        assert after == [3, 4]  # and not α·(3, 4)


def test_balance_options_change_the_result() -> None:
    _, after = run("balance", [3, 4], {"a": [4, 4]}, alpha=0.75)
    assert after == [3.25, 4]
    assert not run("balance", [3, 4], {"a": [4, 4]}, gamma=0.1)[0]["a"].accepted
    late = RoundContext(Round(9), 10)
    assert run("balance", [3, 4], {"a": [4, 4]}, late, kappa=0.0)[0]["a"].accepted


# Self-centred clipping.


def test_clipping_is_around_our_own_model() -> None:
    """Distances 1, 2, 8; τ = 2.  (10, 0) + ¼(1, 0) + ¼(0, 2) + ¼·2/8·(0, −8) = (10.25, 0).
    Clipped around zero, every model would be cut to length 2."""
    verdicts, after = run("scclip", [10, 0], {"a": [11, 0], "b": [10, 2], "c": [10, -8]})
    assert [v.weight for v in verdicts.values()] == [1 / 4, 1 / 4, 1 / 16]
    assert [v.checks["distance"] for v in verdicts.values()] == [1, 2, 8]
    assert {v.checks["limit"] for v in verdicts.values()} == {2}
    assert set(reasons(verdicts).values()) == {Reason.OK}
    assert after == [10.25, 0]


def test_two_equally_distant_peers_are_not_clipped() -> None:
    verdicts, after = run("scclip", [0, 0], {"a": [9, 0], "b": [0, 9], "c": [0, 0]})
    assert [v.weight for v in verdicts.values()] == [1 / 4] * 3
    assert after == [9 / 4, 9 / 4]


def test_a_single_peer_is_clipped_to_zero() -> None:
    verdicts, after = run("scclip", [1, 2], {"a": [1, 3]})
    assert reasons(verdicts) == {"a": Reason.TOO_FAR}
    assert after == [1, 2]
    twin, _ = run("scclip", [1, 2], {"a": [1, 2]})
    assert (twin["a"].accepted, twin["a"].weight) == (True, 0.5)
    assert run("scclip", [1, 2], {})[1] == [1, 2]


# Local.


class Unreadable(Mapping[str, Tensor]):
    def __getitem__(self, name: str) -> Tensor:
        raise AssertionError("a peer's model was read")

    def __iter__(self) -> Any:
        raise AssertionError("a peer's model was read")

    def __len__(self) -> int:
        return 2


def test_local_accepts_no_peer_and_reads_no_model() -> None:
    rule = make_rule("local")
    peers = [Candidate(PeerName("a"), Unreadable()), Candidate(PeerName("b"), Unreadable())]
    verdicts = rule.judge(site("us", [1, 2]), peers, NO_VALIDATION, RoundContext(Round(0))).verdicts
    assert [(v.peer, v.accepted, v.reason) for v in verdicts] == [
        ("a", False, Reason.REFUSED_BY_RULE),
        ("b", False, Reason.REFUSED_BY_RULE),
    ]


# On trained networks.


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("krum", Reason.NOT_SELECTED),
        ("afa", Reason.OUTLIER),
        ("asmr", Reason.OUTLIER),
        ("cfl", Reason.OTHER_CLUSTER),
        ("balance", Reason.TOO_FAR),
    ],
)
def test_a_sign_flipped_network_is_rejected(digits: Any, name: str, reason: Reason) -> None:
    rule: Rule = make_rule(name)
    flipped = Candidate(PeerName("flipped"), corrupt("sfa", digits.sites[1].weights, seed=0))
    honest = [Candidate(PeerName(f"s{i}"), s.weights) for i, s in enumerate(digits.sites[1:])]
    own = Candidate(PeerName("us"), digits.sites[0].weights)
    context = RoundContext(Round(0), 10, digits.start)
    verdicts = rule.judge(own, [*honest, flipped], NO_VALIDATION, context).verdicts
    assert verdicts[-1].reason is reason
    if name != "krum":  # which selects a single model
        assert [v.reason for v in verdicts[:-1]] == [Reason.OK] * 3
