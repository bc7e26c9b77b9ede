"""Every item has one rank, no rank has much more than the others, and no call is larger than measured."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.encoder_worker.ranks.shared_items import share, shared
from triptych.encoder_worker.ranks.tower import calls, divide
from triptych.models.base import PreparedItem

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


def _item(rows: int, *, runs: tuple[tuple[int, int], ...] | None = None, **tensors: torch.Tensor):
    return PreparedItem(rows, rows + 2, (1, rows, 1), cost=rows, tensors=tensors, runs=runs)


def test_items_of_all_dtypes_and_shapes_cross_unchanged_and_their_rows_come_back():
    items = [
        _item(3, pixels=torch.randn(3, 5), mask=torch.tensor([True, False]), scalar=torch.tensor(7)),
        _item(1, runs=((0, 1), (4, 2)), pixels=torch.randn(6, 4).T, empty=torch.empty(0, 4)),
        _item(2, halves=torch.randn(3).to(torch.bfloat16), ids=torch.tensor([[1, 2]], dtype=torch.int32)),
    ]
    descriptor, description, rows = share(items, 4, torch.bfloat16)
    other = shared(descriptor, description)
    os.close(descriptor)
    for ours, theirs in zip(items, other.items, strict=True):
        assert (ours.rows, ours.length, ours.grid_thw, ours.cost, ours.runs) == (
            *(theirs.rows, theirs.length, theirs.grid_thw, theirs.cost, theirs.runs),
        )
        assert list(ours.tensors) == list(theirs.tensors)
        for name, tensor in ours.tensors.items():
            assert tensor.dtype == theirs.tensors[name].dtype
            assert torch.equal(tensor, theirs.tensors[name])
    assert [tuple(place.shape) for place in rows] == [(3, 4), (1, 4), (2, 4)]
    for number, place in enumerate(other.rows):
        place.fill_(number + 1)
    assert [place.unique().tolist() for place in rows] == [[1.0], [2.0], [3.0]]
    assert torch.equal(other.items[0].tensors["pixels"], items[0].tensors["pixels"]), (
        "no place is over another"
    )


def test_a_new_share_holds_nothing_of_an_earlier_one():
    for fill in (5.0, 0.0):
        descriptor, description, rows = share([_item(4)], 8, torch.float32)
        assert not rows[0].any()
        shared(descriptor, description).rows[0].fill_(fill)
        os.close(descriptor)


def test_a_dtype_that_is_not_shared_is_an_error_and_leaves_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError, match="complex64"):
        share([_item(1, wave=torch.zeros(1, dtype=torch.complex64))], 4, torch.float32)
    assert len(os.listdir("/proc/self/fd")) == before
