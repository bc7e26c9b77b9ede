"""Packing of items into replays: each item once, within the limits, and never dearer than one by one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.encoder_worker.graphs.packing import GraphLimits, ItemSize, PackedBatch, pack, smallest_fitting

LIMITS = GraphLimits((128, 256, 512), max_batch_size=4, max_frames_per_batch=6)


def packed(*tokens: int, limits: GraphLimits = LIMITS) -> list[tuple[int, tuple[int, ...]]]:
    """Budget and rows of each item of the replays."""
    packing = pack([ItemSize(each) for each in tokens], limits)
    return [(batch.budget, tuple(tokens[i] for i in batch.items)) for batch in packing.batches]


@pytest.mark.parametrize(
    ("tokens", "replays"),
    [
        ((), []),
        ((10,), [(128, (10,))]),
        ((128,), [(128, (128,))]),
        ((129,), [(256, (129,))]),
        # Smallest first, whatever their order.
        ((100, 20, 100), [(256, (20, 100, 100))]),
        # The fifth item is one too many.
        ((10, 10, 10, 10, 10), [(128, (10, 10, 10, 10)), (128, (10,))]),
        # Together more rows than the largest graph has.
        ((300, 300), [(512, (300,)), (512, (300,))]),
        # 128 + 128 and one replay of 256 are the same rows: one launch is saved.
        ((100, 100), [(256, (100, 100))]),
        # The cliff: 300 rows need 512, alone they take 256 and 128.
        ((200, 100), [(128, (100,)), (256, (200,))]),
        # Where both need 256, a replay of 512 costs the same.
        ((200, 200), [(512, (200, 200))]),
    ],
)
def test_items_are_packed_as_the_table_says(
    tokens: tuple[int, ...], replays: list[tuple[int, tuple[int, ...]]]
) -> None:
    assert packed(*tokens) == replays


def test_what_no_graph_holds_is_encoded_eagerly() -> None:
    sizes = [ItemSize(513), ItemSize(10), ItemSize(20, frames=7), ItemSize(512, frames=6)]
    packing = pack(sizes, LIMITS)
    assert packing.eager == (0, 2)
    assert packing.batches == (PackedBatch(128, (1,)), PackedBatch(512, (3,)))


def test_frames_of_a_replay_are_bounded() -> None:
    packing = pack([ItemSize(8, frames=3), ItemSize(8, frames=3), ItemSize(8, frames=1)], LIMITS)
    assert [batch.items for batch in packing.batches] == [(0, 1), (2,)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[ItemSize], GraphLimits]:
    budgets = tuple(sorted(draw(st.sets(st.integers(1, 600), min_size=1, max_size=5))))
    limits = GraphLimits(budgets, draw(st.integers(1, 6)), draw(st.integers(1, 12)))
    size = st.builds(ItemSize, st.integers(1, 700), st.integers(1, 5))
    return draw(st.lists(size, max_size=12)), limits


@settings(deadline=None, max_examples=50)
@given(cases())
def test_every_item_is_taken_once_and_every_replay_keeps_the_limits(
    case: tuple[list[ItemSize], GraphLimits],
) -> None:
    sizes, limits = case
    packing = pack(sizes, limits)
    taken = [*packing.eager, *(index for batch in packing.batches for index in batch.items)]
    assert sorted(taken) == list(range(len(sizes)))
    for batch in packing.batches:
        rows = sum(sizes[index].tokens for index in batch.items)
        assert 1 <= len(batch.items) <= limits.max_batch_size
        assert sum(sizes[index].frames for index in batch.items) <= limits.max_frames_per_batch
        assert batch.budget == smallest_fitting(limits.budgets, rows)
    for index in packing.eager:
        size = sizes[index]
        assert size.tokens > limits.budgets[-1] or size.frames > limits.max_frames_per_batch


@settings(deadline=None, max_examples=50)
@given(cases())
def test_no_packing_computes_more_rows_than_each_item_by_itself(
    case: tuple[list[ItemSize], GraphLimits],
) -> None:
    sizes, limits = case
    packing = pack(sizes, limits)
    for batch in packing.batches:
        alone = [smallest_fitting(limits.budgets, sizes[index].tokens) or 0 for index in batch.items]
        assert batch.budget <= sum(alone)
