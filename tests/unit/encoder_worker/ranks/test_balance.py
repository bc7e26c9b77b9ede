"""Every item has one rank, no rank has much more than the others, and no call is larger than measured."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.encoder_worker.ranks.tower import calls, divide

COSTS = st.lists(st.integers(1, 5000), max_size=40)


@pytest.mark.parametrize(
    ("costs", "ranks", "shares"),
    [
        ([], 4, [[], [], [], []]),
        ([7], 4, [[0], [], [], []]),
        ([7], 1, [[0]]),
        ([1, 1, 1, 1, 1], 4, [[0, 4], [1], [2], [3]]),
        ([5, 1, 1, 1, 8], 2, [[4], [0, 1, 2, 3]]),
        ([256, 1024, 256, 512], 2, [[1], [0, 2, 3]]),
        ([1, 2, 3], 3, [[2], [1], [0]]),
        ([0, 0, 0], 2, [[0, 2], [1]]),
    ],
)
def test_the_largest_items_go_first_to_the_rank_that_has_least(costs, ranks, shares):
    assert divide(costs, ranks) == shares


@settings(deadline=None, max_examples=50)
@given(COSTS, st.integers(1, 8))
def test_every_item_has_one_rank_and_no_rank_has_more_than_an_equal_share_plus_one_item(costs, ranks):
    shares = divide(costs, ranks)
    assert len(shares) == ranks
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    busiest = max(sum(costs[i] for i in share) for share in shares)
    assert busiest <= sum(costs) / ranks + max(costs, default=0) * (1 - 1 / ranks) + 1e-6
    assert sum(bool(share) for share in shares) == min(ranks, len(costs))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 3))
def test_the_busiest_rank_has_at_most_four_thirds_of_the_best_division(costs, ranks):
    def busiest(owners: tuple[int, ...]) -> int:
        return max(sum(c for c, owner in zip(costs, owners, strict=True) if owner == r) for r in range(ranks))

    best = min(busiest(owners) for owners in itertools.product(range(ranks), repeat=len(costs)))
    found = max(sum(costs[i] for i in share) for share in divide(costs, ranks))
    assert found <= best * 4 / 3


@pytest.mark.parametrize(
    ("costs", "limit", "found"),
    [
        ([], 10, []),
        ([99], 10, [range(1)]),
        ([5, 5, 5], 10, [range(2), range(2, 3)]),
        ([99, 1, 99, 4, 6], 10, [range(1), range(1, 2), range(2, 3), range(3, 5)]),
    ],
)
def test_calls_of_the_tower_keep_to_the_limit_and_a_larger_item_is_alone(costs, limit, found):
    assert calls(costs, limit) == found


@settings(deadline=None, max_examples=50)
@given(COSTS, st.integers(1, 9000))
def test_all_items_are_in_a_call_in_their_order(costs, limit):
    found = calls(costs, limit)
    assert [i for call in found for i in call] == list(range(len(costs)))
    assert all(len(call) == 1 or sum(costs[i] for i in call) <= limit for call in found)
