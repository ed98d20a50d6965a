"""Selection and aggregation, compared with statements of the paper."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightyear_node.errors import ConfigError
from lightyear_node.lab.corrupted_updates import corrupt
from lightyear_node.learning import (
    Candidate,
    Layout,
    MergeShare,
    Rule,
    Validation,
    Weights,
    make_rule,
    shares_of,
    write,
)
from lightyear_node.learning.rules import RULES, FedAvg, Krum, Lightyear, RoundContext
from lightyear_node.types import Digest, PeerName, Reason, Round

Tensors = dict[str, Tensor]


def model(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(3, 4, generator=generator).to(dtype),
        "a.bias": torch.randn(3, generator=generator).to(dtype),
        "norm.running_mean": torch.randn(3, generator=generator).to(dtype),
        "norm.running_var": torch.rand(3, generator=generator).to(dtype),
    }


def evenly(*peers: Tensors, own: bool = True) -> list[MergeShare]:
    weight = 1 / (len(peers) + own)
    return [MergeShare(PeerName(f"p{index}"), peer, weight) for index, peer in enumerate(peers)]


def merged(rule: Rule, own: Tensors, shares: list[MergeShare], t: int = 0) -> Tensors:
    return dict(rule.merge(own, shares, Round(t)))


def mean(*models: Tensors) -> Tensors:
    return {name: torch.stack([m[name] for m in models]).mean(0) for name in models[0]}


def close(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        torch.allclose(left[name], right[name], atol=1e-6) for name in left
    )


def identical(left: Tensors, right: Tensors) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


PAPER = Lightyear(guard=False)


def test_the_first_round_is_the_plain_mean() -> None:
    """θ_i ← θ_i + γ^t·(mean − θ_i), t counted from 0; 'aggregates these models with its own'"""
    own, first, second = model(0), model(1), model(2)
    assert close(merged(PAPER, own, evenly(first, second)), mean(own, first, second))


@pytest.mark.parametrize("t", [1, 5, 40])
def test_later_rounds_change_the_model_less(t: int) -> None:
    """'can be interpreted as a decay of change'"""
    own, peer = model(0), model(1)
    target = mean(own, peer)
    expected = {name: own[name] + 0.95**t * (target[name] - own[name]) for name in own}
    assert close(merged(PAPER, own, evenly(peer), t), expected)


def test_gamma_one_reduces_to_fedavg_over_the_selected_set() -> None:
    """'setting the regulation parameter to 1 reduces the method to the standard FedAvg over the
    updates from the selected aggregation set'"""
    own, shares = model(0), evenly(model(1), model(2), model(3))
    rule = Lightyear(gamma=1.0, guard=False)
    for t in (0, 1, 17):
        assert identical(merged(rule, own, shares, t), merged(FedAvg(), own, shares, t))


def test_without_self_the_mean_is_over_the_neighbours() -> None:
    """Eq. 18 read literally: (1/|S_i|) Σ_{j ∈ S_i} (θ_j − θ_i)"""
    own, first, second = model(0), model(1), model(2)
    rule = Lightyear(guard=False, include_self=False)
    assert close(merged(rule, own, evenly(first, second, own=False)), mean(first, second))


@pytest.mark.parametrize("rule", [PAPER, Lightyear(), FedAvg()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_an_empty_set_leaves_the_model_bit_for_bit(rule: Rule, dtype: torch.dtype) -> None:
    own = model(0, dtype)
    own["a.bias"][0], own["a.bias"][1] = math.nan, -0.0
    after = merged(rule, own, [], 3)
    for name, tensor in own.items():
        assert after[name].dtype == dtype
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8))


def test_the_order_of_peers_does_not_matter() -> None:
    own, shares = model(0), evenly(*(model(seed) for seed in range(1, 5)))
    results = [merged(PAPER, own, list(order), 2) for order in itertools.permutations(shares)]
    assert all(identical(results[0], result) for result in results)


@given(st.integers(0, 999), st.integers(1, 9), st.integers(0, 60))
@settings(max_examples=40, deadline=None)
def test_a_merge_stays_between_its_models(seed: int, peers: int, t: int) -> None:
    models = [model(seed + index) for index in range(peers + 1)]
    after = merged(PAPER, models[0], evenly(*models[1:]), t)
    for name, tensor in after.items():
        stack = torch.stack([m[name] for m in models])
        assert (tensor >= stack.min(0).values - 1e-5).all()
        assert (tensor <= stack.max(0).values + 1e-5).all()


def test_half_precision_is_summed_in_single() -> None:
    own = {"w": torch.full((1,), 1.0, dtype=torch.float16)}
    peers = [{"w": torch.full((1,), 1 + 2**-10, dtype=torch.float16)} for _ in range(1023)]
    (_, after), *_ = PAPER.merge(own, evenly(*peers), Round(0))
    assert float(after) == 1 + 2**-10  # in half precision each of the 1023 steps would be lost
    assert after.dtype == torch.float16


def test_the_guard_does_not_merge_running_statistics() -> None:
    own, peer = model(0), model(1)
    guarded, plain = merged(Lightyear(), own, evenly(peer)), merged(PAPER, own, evenly(peer))
    average = mean(own, peer)
    for name in own:
        local = "running" in name
        assert torch.equal(guarded[name], own[name]) is local
        assert torch.allclose(plain[name], average[name])


def test_a_merge_streams_from_files_into_a_file(tmp_path: Path) -> None:
    own, peer = model(0), model(1)
    layout = Layout.of(own)
    write(tmp_path / "own", layout, own)
    write(tmp_path / "peer", layout, peer)
    with Weights(tmp_path / "own", layout) as mine, Weights(tmp_path / "peer", layout) as theirs:
        shares = [MergeShare(PeerName("p"), theirs, 0.5)]
        write(tmp_path / "new", layout, PAPER.merge(mine, shares, Round(0)))
        write(tmp_path / "same", layout, PAPER.merge(mine, [], Round(0)))
    write(tmp_path / "loose", layout, PAPER.merge(own, evenly(peer), Round(0)))
    assert (tmp_path / "loose").read_bytes() == (tmp_path / "new").read_bytes()
    assert close(dict(Weights(tmp_path / "new", layout)), mean(own, peer))
    assert (tmp_path / "same").read_bytes() == (tmp_path / "own").read_bytes()


def test_shares_with_a_sum_above_one_are_refused() -> None:
    with pytest.raises(ValueError, match="add up"):
        merged(PAPER, model(0), evenly(model(1), own=False) * 2)


# Judging.


def judged(rule: Rule, federation: Any, peers: list[Candidate], samples: int = 0) -> Any:
    site = federation.sites[0]
    own = Candidate(PeerName("us"), site.weights, samples)
    validation = Validation(site.model, site.batches)
    return rule.judge(own, peers, validation, RoundContext(Round(1))).verdicts


def honest(federation: Any, samples: int = 0) -> list[Candidate]:
    return [
        Candidate(PeerName(f"site-{index}"), site.weights, samples, Digest(f"d{index}"))
        for index, site in enumerate(federation.sites[1:])
    ]


def test_selection_is_by_tau(digits: Any) -> None:
    """S_i = { θ_j ∈ N(i) | A(θ_i, θ_j; V_i) ≥ τ }"""
    flipped = Candidate(PeerName("flipped"), corrupt("sfa", digits.sites[1].weights, seed=0))
    peers = [*honest(digits), flipped]
    scores = [v.score for v in judged(PAPER, digits, peers)]
    assert all(0 < score < 1 for score in scores)
    for tau in (0.0, *scores, 1.0):
        verdicts = judged(Lightyear(tau=tau, guard=False), digits, peers)
        assert [v.score for v in verdicts] == scores
        assert [v.accepted for v in verdicts] == [score >= tau for score in scores]
        for verdict in verdicts:
            below = Reason.AGREEMENT_BELOW_TAU
            assert verdict.reason is (Reason.OK if verdict.accepted else below)
            assert verdict.checks == {"agreement": verdict.score, "tau": tau}


def test_verdicts_carry_shares_digests_and_order(digits: Any) -> None:
    broken = Candidate(PeerName("broken"), corrupt("nan", digits.sites[1].weights, seed=0))
    peers = [broken, *reversed(honest(digits))]
    for include_self, share in ((True, 1 / 4), (False, 1 / 3)):
        verdicts = judged(Lightyear(include_self=include_self), digits, peers)
        assert [v.peer for v in verdicts] == [peer.peer for peer in peers]
        assert [v.weight for v in verdicts] == [0.0, *[pytest.approx(share)] * 3]
        assert [v.digest for v in verdicts] == [peer.digest for peer in peers]
        assert [s.peer for s in shares_of(verdicts, peers)] == [peer.peer for peer in peers[1:]]


def test_a_round_without_accepted_peers_changes_nothing(digits: Any) -> None:
    peers = honest(digits)
    rule = Lightyear(tau=1.0)
    verdicts = judged(rule, digits, peers)
    assert not any(v.accepted or v.weight for v in verdicts)
    own = digits.sites[0].weights
    assert identical(merged(rule, own, shares_of(verdicts, peers)), own)


def test_shares_by_samples_are_capped(digits: Any) -> None:
    by_samples = Lightyear(tau=0.0, guard=False, weights="samples")
    ours, peers = 100, [Candidate(c.peer, c.weights, n) for c, n in zip(
        honest(digits), (100, 200, 10**9), strict=False
    )]  # fmt: skip
    *plausible, claims_many = peers
    total = ours + sum(peer.samples for peer in plausible)
    shares = [v.weight for v in judged(by_samples, digits, plausible, samples=ours)]
    assert shares == pytest.approx([peer.samples / total for peer in plausible])
    # However many samples a peer claims, its share is at most half; the rest is ours.
    assert [v.weight for v in judged(by_samples, digits, [claims_many], samples=ours)] == [0.5]
    assert sum(v.weight for v in judged(by_samples, digits, peers, samples=ours)) <= 0.5 + 1e-6
    # One unknown number of samples makes all shares equal.
    unknown = Candidate(claims_many.peer, claims_many.weights, 0)
    equal = judged(by_samples, digits, [*plausible, unknown], samples=ours)
    assert {v.weight for v in equal} == {1 / (len(equal) + 1)}


def test_rounds_without_any_accepted_peer_are_counted(digits: Any) -> None:
    site = digits.sites[0]
    own = Candidate(PeerName("us"), site.weights)
    validation = Validation(site.model, site.batches)
    accept_none, accept_all = Lightyear(tau=1.0), Lightyear(tau=0.0, guard=False)
    alone = accept_none.judge(own, honest(digits), validation, RoundContext(Round(1)))
    alone_again = accept_none.judge(
        own, honest(digits), validation, RoundContext(Round(2), state=alone.state)
    )
    assert (alone.state, alone_again.state) == ({"rounds_alone": 1}, {"rounds_alone": 2})
    back = accept_all.judge(
        own, honest(digits), validation, RoundContext(Round(3), state=alone_again.state)
    )
    assert back.state == {"rounds_alone": 0}


def test_a_site_that_was_alone_accepts_more_distant_peers(digits: Any) -> None:
    site = digits.sites[0]
    own, validation = Candidate(PeerName("us"), site.weights), Validation(site.model, site.batches)
    distant = {n: t * 1.6 if n.endswith("weight") else t for n, t in site.weights.items()}
    peer = Candidate(PeerName("away"), distant)
    found = {}
    for rounds_alone in (0, 500):
        context = RoundContext(Round(1), start=digits.start, state={"rounds_alone": rounds_alone})
        [verdict] = Lightyear().judge(own, [peer], validation, context).verdicts
        assert verdict.checks["distance"] == pytest.approx(0.6)
        found[rounds_alone] = (verdict.reason is Reason.TOO_FAR, verdict.checks["distance_max"])
    assert found == {0: (True, 0.5), 500: (False, 1.0)}


def behind(digits: Any, rounds_alone: int, peers: Any) -> Any:
    """Judgement of a site that has hardly trained while its peers are far ahead."""
    own = {name: tensor * 0.1 for name, tensor in digits.start.items()}
    site = digits.sites[0]
    context = RoundContext(Round(40), start=own, state={"rounds_alone": rounds_alone})
    return own, Lightyear().judge(
        Candidate(PeerName("us"), own), peers, Validation(site.model, site.batches), context
    )


def test_a_site_far_behind_adopts_the_peer_model_with_the_lowest_loss(digits: Any) -> None:
    peers = honest(digits)
    _, first = behind(digits, 0, peers)
    assert {verdict.reason for verdict in first.verdicts} == {Reason.TOO_FAR}
    assert first.state == {"rounds_alone": 1}
    own, second = behind(digits, 1, peers)
    [taken] = [verdict for verdict in second.verdicts if verdict.accepted]
    assert (taken.reason, taken.weight) == (Reason.CAUGHT_UP, 1.0)
    assert taken.checks["regret"] == min(v.checks["regret"] for v in first.verdicts) < 0
    assert second.state == {"rounds_alone": 0}
    # Copied unchanged, although gamma^t is small in this late round.
    [peer] = [peer for peer in peers if peer.peer == taken.peer]
    merged = dict(Lightyear().merge(own, [MergeShare(peer.peer, peer.weights, 1.0)], Round(40)))
    assert all(torch.allclose(merged[name], peer.weights[name], atol=1e-6) for name in own)


def test_a_site_adopts_no_worse_model_and_none_if_a_near_peer_exists(
    digits: Any,
) -> None:
    site = digits.sites[0]
    own, validation = Candidate(PeerName("us"), site.weights), Validation(site.model, site.batches)
    noise = Candidate(PeerName("noise"), {n: t * 50 for n, t in digits.start.items()})
    context = RoundContext(Round(40), start=digits.start, state={"rounds_alone": 9})
    [verdict] = Lightyear().judge(own, [noise], validation, context).verdicts
    assert verdict.reason is Reason.TOO_FAR
    # If a peer is near, distant peers are rejected however low their loss is.
    _, alone = behind(digits, 1, honest(digits))
    near = Candidate(PeerName("near"), {n: t * 0.1 for n, t in digits.start.items()})
    _, with_near = behind(digits, 1, [*honest(digits), near])
    assert any(verdict.accepted for verdict in alone.verdicts)
    assert Reason.CAUGHT_UP not in {verdict.reason for verdict in with_near.verdicts}


def test_a_slightly_better_model_does_not_replace_ours(digits: Any) -> None:
    """Faulty peers that are all far away may have a slightly lower loss by accident."""
    site = digits.sites[0]
    own, validation = Candidate(PeerName("us"), site.weights), Validation(site.model, site.batches)
    head = list(site.weights)[-2:]
    bolder = {n: t * 2.1 if n in head else t for n, t in site.weights.items()}
    context = RoundContext(Round(40), start=digits.start, state={"rounds_alone": 9})
    peer = Candidate(PeerName("bolder"), bolder)
    [verdict] = Lightyear().judge(own, [peer], validation, context).verdicts
    assert verdict.checks["regret"] < 0
    assert (verdict.accepted, verdict.reason) == (False, Reason.TOO_FAR)


@pytest.mark.parametrize(
    ("shapes", "adopts"),
    [
        ((), False),  # one peer supports itself
        (("near",), True),
        (("near", "other"), True),
        (("near", "other", "other"), False),  # two of four are not most of them
        (("other", "other"), False),
    ],
)
def test_a_better_model_that_most_peers_are_near_replaces_ours(
    digits: Any, shapes: tuple[str, ...], adopts: bool
) -> None:
    """The sites of a working federation are near each other; faulty models are not."""
    site = digits.sites[0]
    own, validation = Candidate(PeerName("us"), site.weights), Validation(site.model, site.batches)
    head = list(site.weights)[-2:]

    def scaled(factor: float) -> dict[str, Tensor]:
        return {n: t * factor if n in head else t for n, t in site.weights.items()}

    factors = {"near": 2.2, "other": 9.0}
    peers = [Candidate(PeerName("best"), scaled(2.1))]
    for number, shape in enumerate(shapes):
        factor = factors[shape] * (-1.0) ** number if shape == "other" else factors[shape]
        peers.append(Candidate(PeerName(f"{shape}-{number}"), scaled(factor)))
    context = RoundContext(Round(40), start=digits.start, state={"rounds_alone": 9})
    verdicts = Lightyear().judge(own, peers, validation, context).verdicts
    taken = [verdict.peer for verdict in verdicts if verdict.reason is Reason.CAUGHT_UP]
    assert taken == (["best"] if adopts else [])


def test_a_supported_model_that_has_not_learned_does_not_replace_ours(digits: Any) -> None:
    """Sign-flipped models of two sites are near each other, and one may be better by accident."""

    def timid(factor: float) -> dict[str, Tensor]:
        """The smaller the weights, the closer to guessing."""
        return {name: tensor * factor for name, tensor in digits.start.items()}

    found = {}
    for factor in (0.3, 1.0):
        peers = [Candidate(PeerName(f"p{n}"), timid(factor + n / 100)) for n in range(2)]
        _, judged = behind(digits, 1, peers)
        found[factor] = (
            [v.checks["regret"] for v in judged.verdicts],
            any(v.accepted for v in judged.verdicts),
        )
    (regrets, adopted), (_, learned) = found[0.3], found[1.0]
    assert all(-0.3 * math.log(10) < regret < 0 for regret in regrets)
    assert not adopted
    assert learned


def test_the_guard_does_not_require_agreement_in_the_first_round(digits: Any) -> None:
    site = digits.sites[0]
    own, validation = Candidate(PeerName("us"), site.weights), Validation(site.model, site.batches)
    for guard, round, accepted in ((True, 0, True), (True, 1, False), (False, 0, False)):
        rule = Lightyear(tau=1.0, guard=guard)
        verdicts = rule.judge(own, honest(digits), validation, RoundContext(Round(round))).verdicts
        assert {verdict.accepted for verdict in verdicts} == {accepted}
        assert all(0 < verdict.score < 1 for verdict in verdicts)  # recorded in any case


def test_our_own_model_has_full_agreement(digits: Any) -> None:
    """'A(θ_i, θ_i) = 1 ≥ τ': the own model would select itself."""
    twin = Candidate(PeerName("twin"), digits.sites[0].weights)
    (verdict,) = judged(Lightyear(tau=1.0 - 1e-12), digits, [twin])
    assert verdict.accepted
    assert verdict.checks["distance"] == 0
    assert verdict.checks["regret"] == 0


def test_another_schema_is_refused_by_every_rule(digits: Any) -> None:
    weights = digits.sites[1].weights
    other_schemas = [
        {name: tensor for name, tensor in weights.items() if name != "7.bias"},
        {**weights, "8.bias": torch.zeros(1)},
        {**weights, "7.bias": torch.zeros(11)},
        {**weights, "7.bias": weights["7.bias"].double()},
    ]
    peers = [Candidate(PeerName(f"s{index}"), t) for index, t in enumerate(other_schemas)]
    for rule in (Lightyear(), PAPER, FedAvg()):
        verdicts = judged(rule, digits, [*peers, *honest(digits)])
        assert [v.reason for v in verdicts[:4]] == [Reason.SCHEMA_MISMATCH] * 4
        assert [v.weight for v in verdicts] == [0.0] * 4 + [1 / 4] * 3


def test_fedavg_weights_by_samples_if_all_are_known(digits: Any) -> None:
    peers = honest(digits, samples=30)
    assert [v.weight for v in judged(FedAvg(), digits, peers, samples=10)] == [0.3, 0.3, 0.3]
    assert [v.weight for v in judged(FedAvg(), digits, peers)] == [0.25] * 3


def test_fedavg_has_no_protection(digits: Any) -> None:
    flipped = Candidate(PeerName("flipped"), corrupt("sfa", digits.sites[0].weights, seed=0))
    verdicts = judged(FedAvg(), digits, [flipped])
    assert verdicts[0].accepted
    after = merged(FedAvg(), digits.sites[0].weights, shares_of(verdicts, [flipped]))
    assert all(not tensor.any() for tensor in after.values())  # θ and −θ have a mean of zero


def test_fedavg_rejects_a_model_with_nan(digits: Any) -> None:
    broken = Candidate(PeerName("broken"), corrupt("nan", digits.sites[1].weights, seed=0))
    verdicts = judged(FedAvg(), digits, [broken, *honest(digits)])
    assert (verdicts[0].reason, verdicts[0].weight) == (Reason.NONFINITE, 0.0)
    assert [v.weight for v in verdicts[1:]] == [1 / 4] * 3


def test_rules_are_created_by_name() -> None:
    assert make_rule("lightyear", {}) == Lightyear(tau=0.6, gamma=0.95, guard=True)
    options = {"tau": 1, "gamma": 0.5, "guard": False, "include_self": False}
    assert make_rule("lightyear", options) == Lightyear(1, 0.5, False, False)
    assert make_rule("fedavg") == FedAvg()
    assert make_rule("krum", {"faulty": None}) == Krum() != make_rule("krum", {"faulty": 1})
    assert {name: type(make_rule(name)) for name in RULES} == dict(RULES)
    assert list(RULES) == [
        "lightyear", "fedavg", "krum", "afa", "asmr", "cfl", "ditto", "fedprox", "balance",
        "scclip", "local",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("lightyeer", {}, "lightyear"),
        ("nonsense-rule", {}, "fedavg"),
        ("lightyear", {"taau": 0.5}, "tau"),
        ("fedavg", {"tau": 0.5}, "tau"),
        ("lightyear", {"tau": 1.5}, "between 0 and 1"),
        ("lightyear", {"gamma": 0}, "above 0"),
        ("lightyear", {"guard": 1}, "not a bool"),
        ("lightyear", {"tau": True}, "not a float"),
        ("lightyear", {"tau": "0.6"}, "not a float"),
        ("lightyear", {"tau": None}, "not a float"),
        ("krum", {"faulty": 1.5}, "not an int or None"),
        ("krum", {"faulty": True}, "not an int or None"),
        ("krum", {"faulty": -1}, "0 or above"),
        ("fedprox", {"mu": -0.1}, "0 or above"),
        ("fedprox", {"mu": math.nan}, "0 or above"),
        ("ditto", {"lam": math.inf}, "0 or above"),
        ("ditto", {"lambda": 1}, "lam"),
        ("afa", {"xi": 0}, "above 0"),
        ("afa", {"xi_step": -1}, "0 or above"),
        ("balance", {"gamma": 0}, "above 0"),
        ("balance", {"kappa": -1}, "0 or above"),
        ("balance", {"alpha": 1}, "local"),
        ("local", {"tau": 0.6}, "has none"),
    ],
)
def test_an_invalid_rule_is_refused_with_a_hint(name: str, options: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_rule(name, options)
    assert expected in f"{caught.value} {caught.value.hint}"
