"""Direction-based baselines, compared with values by hand, numpy, SciPy and scikit-learn."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta
from sklearn.cluster import AgglomerativeClustering

from lightyear_node.learning import make_rule
from lightyear_node.learning.rules import Judgement, RoundContext
from lightyear_node.learning.rules.afa import beta_cdf_half, select
from lightyear_node.learning.rules.asmr import cut
from lightyear_node.learning.rules.cfl import bipartition
from lightyear_node.types import Reason, Round
from tests.support.short_vectors import NO_VALIDATION, reasons, run, site, tensors

# AFA.


def afa_reference(
    models: np.ndarray[Any, Any], influence: np.ndarray[Any, Any], xi: float = 2, step: float = 0.5
) -> list[int]:
    """The paper's listing, on whole vectors."""
    good = list(range(len(models)))
    while True:
        aggregate = sum(influence[k] * models[k] for k in good) / sum(influence[k] for k in good)
        norm = np.linalg.norm
        s = {k: models[k] @ aggregate / norm(models[k]) / norm(aggregate) for k in good}
        values = np.array(list(s.values()))
        middle, spread = np.median(values), values.std()
        if values.mean() < middle:
            bad = [k for k in good if s[k] < middle - xi * spread]
        else:
            bad = [k for k in good if s[k] > middle + xi * spread]
        if not bad:
            return good
        good = [k for k in good if k not in bad]
        xi += step


def test_afa_drops_the_same_models_as_the_papers_listing() -> None:
    random = np.random.default_rng(0)
    dropped = 0
    for _ in range(300):
        sites = int(random.integers(2, 12))
        models = random.normal(size=(sites, 5)) * 0.3 + random.normal(size=5)
        models[: random.integers(0, sites)] *= random.choice([-1, 0.5, 3])
        influence = random.uniform(0.1, 5, size=sites)
        kept = np.flatnonzero(select(models @ models.T, influence, 2.0, 0.5).kept).tolist()
        assert kept == afa_reference(models, influence)
        dropped += sites - len(kept)
    assert dropped > 100  # otherwise nothing was compared


SIMILAR = {name: [1.0, 0.01 * index] for index, name in enumerate("abcd")}
FLIPPED = {"z": [-1.0, 0.0]}


def afa(state: Mapping[str, Any], peers: Mapping[str, Sequence[float]]) -> Judgement:
    candidates = [site(name, values) for name, values in peers.items()]
    context = RoundContext(
        Round(0), state=json.loads(json.dumps(state))
    )  # as read from the journal
    return make_rule("afa").judge(site("us", [1, 0.02]), candidates, NO_VALIDATION, context)


def test_afa_drops_an_outlier_and_updates_reputations() -> None:
    first = afa({}, SIMILAR | FLIPPED)
    assert [v.reason for v in first.verdicts] == [Reason.OK] * 4 + [Reason.OUTLIER]
    assert [v.weight for v in first.verdicts] == [pytest.approx(1 / 5)] * 4 + [0]
    flipped = first.verdicts[-1].checks
    assert flipped["cosine"] < flipped["limit"]
    assert flipped["reputation"] == 0.5
    assert first.state["alpha"] == dict.fromkeys("abcd", 4) | {"us": 4, "z": 3}
    assert first.state["beta"] == dict.fromkeys("abcd", 3) | {"us": 3, "z": 4}


def test_afa_weights_by_reputation_and_samples() -> None:
    """p_a = 6/10, p_b = 2/10, ours 3/6; samples 10, 30, 20: 6, 6 and 10 of 22"""
    peers = [site("a", [1, 0.01], 10), site("b", [1, 0.02], 30)]
    state = {"alpha": {"a": 6, "b": 2}, "beta": {"a": 4, "b": 8}, "blocked": []}
    context = RoundContext(Round(5), state=state)
    verdicts = (
        make_rule("afa").judge(site("us", [1, 0.0], 20), peers, NO_VALIDATION, context).verdicts
    )
    assert [v.weight for v in verdicts] == [pytest.approx(6 / 22), pytest.approx(6 / 22)]
    assert [v.checks["reputation"] for v in verdicts] == [0.6, 0.2]


def test_afa_blocks_permanently() -> None:
    """Beta(3, 8): P(x ≤ ½) = .945; Beta(3, 9): .967.  Six drops block even a good model."""
    state: Mapping[str, Any] = {}
    for dropped in range(1, 7):
        judgement = afa(state, SIMILAR | FLIPPED)
        assert judgement.verdicts[-1].reason is Reason.OUTLIER
        state = judgement.state
        assert state["blocked"] == (["z"] if dropped == 6 else [])
    for sent in (FLIPPED, {"z": [1.0, 0.0]}):
        judgement = afa(state, SIMILAR | sent)
        assert (judgement.verdicts[-1].reason, judgement.verdicts[-1].weight) == (Reason.BLOCKED, 0)
        assert (judgement.state["alpha"]["z"], judgement.state["beta"]["z"]) == (3, 9)
        state = judgement.state
    absent = afa(state, SIMILAR)  # a round without its model
    assert afa(absent.state, SIMILAR | FLIPPED).verdicts[-1].reason is Reason.BLOCKED
    without_state = afa({}, SIMILAR | FLIPPED)
    assert (
        without_state.verdicts[-1].reason is Reason.OUTLIER
    )  # without the state no peer is blocked


def test_afa_may_drop_our_own_model_but_never_blocks_it() -> None:
    rule = make_rule("afa")
    candidates = [site(name, values) for name, values in SIMILAR.items()]
    state: Mapping[str, Any] = {}
    for _ in range(8):
        judgement = rule.judge(
            site("us", [-1, 0]), candidates, NO_VALIDATION, RoundContext(Round(0), state=state)
        )
        assert [v.weight for v in judgement.verdicts] == [pytest.approx(1 / 4)] * 4
        state = judgement.state
    assert (state["beta"]["us"], state["blocked"]) == (11, [])


def test_afa_does_not_drop_for_rounding_errors() -> None:
    third = [1 / 3, 1 / 7]
    twins = {f"p{index}": third for index in range(9)}
    verdicts, after = run("afa", third, twins)
    assert set(reasons(verdicts).values()) == {Reason.OK}
    assert after == third


def test_the_beta_distribution_at_one_half() -> None:
    for a in (1, 2, 3, 9, 40):
        for b in (1, 3, 8, 9, 100):
            assert beta_cdf_half(a, b) == pytest.approx(beta.cdf(0.5, a, b), rel=1e-12)
    assert beta_cdf_half(3, 3000) == 1.0  # binomials would overflow a float


# ASMR.


def test_asmr_cuts_at_the_largest_gap() -> None:
    """Angles 0°, 0° and 90°: mean distances ½, ½, 1; densities 2, 2, 1; factors 1.2, 1.2, .6"""
    verdicts, after = run("asmr", [1, 0], {"a": [2, 0], "b": [0, 1]})
    assert {n: v.checks["outlier_factor"] for n, v in verdicts.items()} == pytest.approx(
        {"a": 1.2, "b": 0.6}
    )
    assert [v.checks["limit"] for v in verdicts.values()] == pytest.approx([1.2] * 2)
    assert reasons(verdicts) == {"a": Reason.OK, "b": Reason.OUTLIER}
    assert after == [1.5, 0]


def test_asmr_may_drop_our_own_model() -> None:
    verdicts, after = run("asmr", [0, 1], {"a": [1, 0], "b": [3, 0]})
    assert [v.weight for v in verdicts.values()] == [0.5, 0.5]
    assert after == pytest.approx([2, 0])


def test_asmr_compares_only_directions() -> None:
    """The longest vector has our direction; by Euclidean distance it would be dropped."""
    verdicts, _ = run("asmr", [1, 0.1], {"a": [1, 0], "b": [50, 5], "c": [-1, 0]})
    assert reasons(verdicts) == {"a": Reason.OK, "b": Reason.OK, "c": Reason.OUTLIER}


def test_asmr_without_a_gap_keeps_every_peer() -> None:
    for peers in ({"a": [0, 1]}, {"a": [1, 0], "b": [2, 0], "c": [3, 0]}):
        verdicts, _ = run("asmr", [1, 0], peers)
        assert set(reasons(verdicts).values()) == {Reason.OK}
        assert [v.weight for v in verdicts.values()] == [1 / (len(peers) + 1)] * len(peers)


def test_the_lower_of_equal_gaps_is_cut() -> None:
    assert cut(np.array([3.0, 1.0, 2.0])) == 2.0
    assert cut(np.array([5.0, 1.0, 2.0])) == 5.0


# CFL.


def test_cfl_compares_updates_and_not_weights() -> None:
    """From (10, 0) we moved by (1, 0), a by (2, 0), b by (5, 5), c by (−1, 0): c is opposite.
    As weights (11, 0), (12, 0), (9, 0) point the same way and b = (15, 5) would be the outlier."""
    peers = {"a": [12, 0], "b": [15, 5], "c": [9, 0]}
    verdicts, after = run("cfl", [11, 0], peers, RoundContext(Round(0), start=tensors([10, 0])))
    assert reasons(verdicts) == {"a": Reason.OK, "b": Reason.OK, "c": Reason.OTHER_CLUSTER}
    cosines = {name: verdict.checks["cosine"] for name, verdict in verdicts.items()}
    assert cosines == pytest.approx({"a": 1, "b": math.sqrt(0.5), "c": -1})
    assert after == pytest.approx([38 / 3, 5 / 3])


def test_cfl_follows_the_larger_cluster_even_without_us() -> None:
    peers = {"a": [1, 1], "b": [1, 1.1], "c": [1.1, 1]}
    verdicts, after = run("cfl", [-1, -1], peers, RoundContext(Round(0), start=tensors([0, 0])))
    assert [v.weight for v in verdicts.values()] == [1 / 3] * 3
    assert after == pytest.approx([3.1 / 3, 3.1 / 3])


def test_cfl_follows_our_cluster_of_two_equal_ones() -> None:
    start = RoundContext(Round(0), start=tensors([0, 0]))
    verdicts, _ = run("cfl", [1, 0], {"a": [-1, 0], "b": [-1, 0.1], "c": [1, 0.1]}, start)
    assert [name for name, v in verdicts.items() if v.accepted] == ["c"]
    alone, after = run("cfl", [1, 0], {"a": [1, 0.1]}, start)
    assert reasons(alone) == {"a": Reason.OTHER_CLUSTER}
    assert after == [1, 0]


def test_cfl_without_a_start_uses_differences_from_ours() -> None:
    """Differences (1, 0), (1, .1), (−1, 0), and zero for us: the first two are closest."""
    verdicts, _ = run("cfl", [5, 5], {"a": [6, 5], "b": [6, 5.1], "c": [4, 5]})
    assert verdicts["a"].reason == verdicts["b"].reason
    assert verdicts["a"].checks["cosine"] == 0


def test_clusters_are_those_of_complete_linkage() -> None:
    random = np.random.default_rng(1)
    unlike_single = 0
    for _ in range(150):
        points = random.normal(size=(int(random.integers(3, 10)), 3))
        unit = points / np.linalg.norm(points, axis=1, keepdims=True)
        distances = 1 - unit @ unit.T
        ours = {frozenset(cluster) for cluster in bipartition(distances)}
        assert ours == _clusters(distances, "complete")
        unlike_single += ours != _clusters(distances, "single")
    assert unlike_single > 20


def _clusters(distances: np.ndarray[Any, Any], linkage: str) -> set[frozenset[int]]:
    kind = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage=linkage)
    labels = kind.fit_predict(distances)
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in (0, 1)}
