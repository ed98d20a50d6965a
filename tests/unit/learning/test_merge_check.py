"""Which peers are dropped from a harmful merge: worst first, as few as needed, deterministic."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightyear_node.learning.chance import Chance
from lightyear_node.learning.merge_check import Measured, choose_dropped, loss_limit
from lightyear_node.types import Harm, PeerName

B, C, D = (PeerName(f"site-{letter}") for letter in "bcd")
GUESSING = math.log(2)
CHANCE = Chance.of_classes(2)


def choose(harms: Mapping[PeerName, float], own_loss: float = 0.4, limit: float = 0.5) -> Harm:
    """The choice if each peer adds this much to the loss, independently of the others."""

    def measure_without(dropped: Collection[PeerName]) -> Measured:
        harm = sum(harm for peer, harm in harms.items() if peer not in dropped)
        return Measured(own_loss + harm)

    return choose_dropped(list(harms), measure_without, own_loss=own_loss, limit=limit)


def test_a_harmless_merge_is_measured_once() -> None:
    found = choose({B: 0.05, C: 0.04})
    assert (found.dropped, found.kept_local) == ((), False)
    assert [(one.without, round(one.loss, 6)) for one in found.tried] == [((), 0.49)]
    assert (found.loss_before, found.limit) == (0.4, 0.5)


def test_the_worst_is_dropped_first_and_no_more_than_needed() -> None:
    found = choose({B: 0.02, C: 0.3, D: 0.2})
    assert (found.dropped, found.kept_local) == ((C, D), False)
    assert {one.without for one in found.tried} == {
        *((), (C, D), (B, D), (B, C)),  # all peers, and each peer alone
        (C,),  # then without the worst; without both is already measured
    }
    assert choose({B: 0.02, C: 0.3, D: 0.07}).dropped == (C,)


def test_ties_are_dropped_in_name_order() -> None:
    for order in itertools.permutations((B, C, D)):
        assert choose(dict.fromkeys(order, 0.09)).dropped == (B, C)


def test_our_own_model_is_kept_if_every_peer_is_harmful() -> None:
    found = choose({B: 0.2, C: 0.3})
    assert (found.dropped, found.kept_local) == ((C, B), True)
    one = choose({B: 0.2})
    assert (one.dropped, one.kept_local, len(one.tried)) == ((B,), True, 1)


def test_one_of_two_peers_harmful_only_together_is_kept() -> None:
    def measure_without(dropped: Collection[PeerName]) -> Measured:
        return Measured(0.45 if dropped else 2.0)

    found = choose_dropped([C, B], measure_without, own_loss=0.4, limit=0.5)
    assert (found.dropped, found.kept_local) == ((B,), False)


@pytest.mark.parametrize("nonfinite", [math.nan, math.inf])
def test_a_nonfinite_loss_is_harm_even_if_our_own_is_nonfinite(nonfinite: float) -> None:
    found = choose({B: nonfinite, C: 0.05})
    assert (found.dropped, found.kept_local) == ((B,), False)
    assert all(math.isfinite(one.loss) for one in found.tried)  # as JSON requires
    assert "to no number, above" in found.description()
    limit = loss_limit(3, nonfinite, CHANCE, 0.1)
    again = choose_dropped([B], lambda _: Measured(nonfinite), own_loss=nonfinite, limit=limit)
    assert again.kept_local
    found = choose_dropped([B], lambda _: Measured(9.0), own_loss=nonfinite, limit=limit)
    assert found.dropped == ()


def test_decisions_that_are_worse_are_harm_although_the_loss_is_lower() -> None:
    worse, within = Measured(0.3, -0.11, 0.1), Measured(0.3, -0.09, 0.1)

    def choose_among(table: Mapping[frozenset[PeerName], Measured]) -> Harm:
        return choose_dropped(
            [B, C], lambda dropped: table[frozenset(dropped)], own_loss=0.4, limit=0.5
        )

    none, only_c, only_b = frozenset[PeerName](), frozenset([B]), frozenset([C])
    found = choose_among({none: within, only_b: worse, only_c: worse})
    assert found.dropped == ()
    assert found.description() == "merging did no harm"
    # The peer with which our decisions are worse is left out first, although its loss is lower.
    high = Measured(0.49, 0.0, 0.1)
    found = choose_among({none: worse, only_b: worse, only_c: high})
    assert found.dropped == (B,)
    assert "with all updates our decisions would have changed by -11 ± 10 points" in (
        found.description()
    )
    assert choose_among({none: worse, only_b: worse, only_c: worse}).kept_local


def test_no_error_means_that_any_loss_of_decisions_is_harm() -> None:
    """All samples change alike."""
    assert Measured(0.4, -0.01, 0.0).decides_worse
    assert not Measured(0.4, 0.0, 0.0).decides_worse


def test_the_limit_is_our_own_loss_plus_a_share_of_the_loss_of_guessing() -> None:
    for own in (0.0, 0.2, GUESSING, 3.0):
        assert loss_limit(1, own, CHANCE, 0.1) == pytest.approx(own + 0.1 * GUESSING)
        assert loss_limit(1, own, CHANCE, 0.0) == own
    # In the first round the limit is at least the chance loss; above it the usual limit applies.
    assert loss_limit(0, 0.2, CHANCE, 0.1) == GUESSING
    assert loss_limit(0, 3.0, CHANCE, 0.1) == loss_limit(1, 3.0, CHANCE, 0.1)


def test_a_measured_unit_limits_a_loss_of_any_scale_and_sign() -> None:
    dice = Chance(level=-0.5, unit=0.4, measured=True)
    assert loss_limit(1, -0.9, dice, 0.1) == pytest.approx(-0.86)
    assert loss_limit(0, -0.9, dice, 0.1) == -0.5
    # Above the level the slack grows with the distance from it.
    raw = Chance(level=4e5, unit=3e5, measured=True)
    assert loss_limit(1, 9e6, raw, 0.1) == pytest.approx(9e6 + 0.1 * 8.6e6)


GAINS = st.none() | st.floats(-1, 1)
LOSSES = st.one_of(st.floats(0, 10), st.sampled_from([math.nan, math.inf]))


@given(
    count=st.integers(1, 5),
    losses=st.lists(LOSSES, min_size=31, max_size=31),
    gains=st.lists(GAINS, min_size=31, max_size=31),
    own_loss=LOSSES,
    allowed=st.floats(0, 1),
    round=st.integers(0, 3),
)
def test_the_kept_model_is_within_the_limit_or_our_own(
    count: int,
    losses: list[float],
    gains: list[float | None],
    own_loss: float,
    allowed: float,
    round: int,
) -> None:
    """For arbitrary losses and decisions of all possible merges."""
    peers = [PeerName(f"site-{index}") for index in range(count)]
    subsets = [
        frozenset(kept)
        for size in range(1, count + 1)
        for kept in itertools.combinations(peers, size)
    ]
    measures = [
        Measured(loss, gain, None if gain is None else 0.1)
        for loss, gain in zip(losses, gains, strict=True)
    ]
    table = dict(zip(subsets, measures, strict=False))
    measured: list[frozenset[PeerName]] = []

    def measure_without(dropped: Collection[PeerName]) -> Measured:
        measured.append(frozenset(peers) - frozenset(dropped))
        return table[measured[-1]]

    limit = loss_limit(round, own_loss, CHANCE, allowed)
    found = choose_dropped(peers, measure_without, own_loss=own_loss, limit=limit)
    assert len(measured) == len(set(measured)) <= 2 * count
    assert len(set(found.dropped)) == len(found.dropped)
    kept = frozenset(peers) - frozenset(found.dropped)
    assert found.kept_local == (not kept)
    if kept:
        assert table[kept].loss <= limit < math.inf
        gain = table[kept].gain
        assert gain is None or gain >= -0.1
    as_journaled = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert Harm.from_plain(as_journaled) == found
    assert choose_dropped(peers[::-1], measure_without, own_loss=own_loss, limit=limit) == found
