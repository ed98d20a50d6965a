"""Who is left out of a merge that would do harm: worst first, as few as needed, the same again."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightyear_node.learning.harm import limit_of, weigh
from lightyear_node.records import Harm, PeerName

B, C, D = (PeerName(f"site-{letter}") for letter in "bcd")
CHANCE = math.log(2)


def added(harms: Mapping[PeerName, float], own_loss: float = 0.4, limit: float = 0.5) -> Harm:
    """Each of them adds so much to the loss, whoever else is there."""

    def loss_without(dropped: Collection[PeerName]) -> float:
        return own_loss + sum(harm for peer, harm in harms.items() if peer not in dropped)

    return weigh(list(harms), loss_without, own_loss=own_loss, limit=limit)


def test_a_harmless_merge_is_measured_once() -> None:
    found = added({B: 0.05, C: 0.04})
    assert (found.dropped, found.kept_local) == ((), False)
    assert [(one.without, round(one.loss, 6)) for one in found.tried] == [((), 0.49)]
    assert (found.loss_before, found.limit) == (0.4, 0.5)


def test_the_worst_is_left_out_first_and_no_more_than_needed() -> None:
    found = added({B: 0.02, C: 0.3, D: 0.2})
    assert (found.dropped, found.kept_local) == ((C, D), False)
    assert {one.without for one in found.tried} == {
        *((), (C, D), (B, D), (B, C)),  # all, and each of them alone
        (C,),  # and then without the worst; without both was already known
    }
    assert added({B: 0.02, C: 0.3, D: 0.07}).dropped == (C,)


def test_equals_are_left_out_in_the_order_of_their_names() -> None:
    for order in itertools.permutations((B, C, D)):
        assert added(dict.fromkeys(order, 0.09)).dropped == (B, C)


def test_when_everybody_does_harm_our_own_model_is_kept() -> None:
    found = added({B: 0.2, C: 0.3})
    assert (found.dropped, found.kept_local) == ((C, B), True)
    one = added({B: 0.2})
    assert (one.dropped, one.kept_local, len(one.tried)) == ((B,), True, 1)


def test_of_two_that_are_harmful_only_together_one_stays() -> None:
    def loss_without(dropped: Collection[PeerName]) -> float:
        return 0.45 if dropped else 2.0

    found = weigh([C, B], loss_without, own_loss=0.4, limit=0.5)
    assert (found.dropped, found.kept_local) == ((B,), False)


@pytest.mark.parametrize("nonsense", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_harm_also_where_our_own_is_none(nonsense: float) -> None:
    found = added({B: nonsense, C: 0.05})
    assert (found.dropped, found.kept_local) == ((B,), False)
    assert all(math.isfinite(one.loss) for one in found.tried)  # as JSON needs it
    assert "to no number, above" in found.in_words()
    limit = limit_of(3, nonsense, CHANCE, 0.1)
    again = weigh([B], lambda dropped: nonsense, own_loss=nonsense, limit=limit)
    assert again.kept_local
    assert weigh([B], lambda dropped: 9.0, own_loss=nonsense, limit=limit).dropped == ()


def test_the_limit_is_our_own_loss_and_a_share_of_what_guessing_costs() -> None:
    for own in (0.0, 0.2, CHANCE, 3.0):
        assert limit_of(1, own, CHANCE, 0.1) == pytest.approx(own + 0.1 * CHANCE)
        assert limit_of(1, own, CHANCE, 0.0) == own
    # In the first round guessing is good enough; and who is worse than that needs no more room.
    assert limit_of(0, 0.2, CHANCE, 0.1) == CHANCE
    assert limit_of(0, 3.0, CHANCE, 0.1) == limit_of(1, 3.0, CHANCE, 0.1)


LOSSES = st.one_of(st.floats(0, 10), st.sampled_from([math.nan, math.inf]))


@given(
    count=st.integers(1, 5),
    losses=st.lists(LOSSES, min_size=31, max_size=31),
    own_loss=LOSSES,
    allowed=st.floats(0, 1),
    round=st.integers(0, 3),
)
def test_what_is_kept_is_within_the_limit_or_our_own(
    count: int, losses: list[float], own_loss: float, allowed: float, round: int
) -> None:
    """Whatever the losses of all possible merges are."""
    peers = [PeerName(f"site-{index}") for index in range(count)]
    subsets = [
        frozenset(kept)
        for size in range(1, count + 1)
        for kept in itertools.combinations(peers, size)
    ]
    table = dict(zip(subsets, losses, strict=False))
    asked: list[frozenset[PeerName]] = []

    def loss_without(dropped: Collection[PeerName]) -> float:
        asked.append(frozenset(peers) - frozenset(dropped))
        return table[asked[-1]]

    limit = limit_of(round, own_loss, CHANCE, allowed)
    found = weigh(peers, loss_without, own_loss=own_loss, limit=limit)
    assert len(asked) == len(set(asked)) <= 2 * count
    assert len(set(found.dropped)) == len(found.dropped)
    kept = frozenset(peers) - frozenset(found.dropped)
    assert found.kept_local == (not kept)
    if kept:
        assert table[kept] <= limit < math.inf
    as_journaled = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert Harm.from_plain(as_journaled) == found
    assert weigh(peers[::-1], loss_without, own_loss=own_loss, limit=limit) == found
