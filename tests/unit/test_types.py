"""Placements say which rows of an encoder output a stretch of prompt tokens consumes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.base.types import ItemPlan, Placement, runs_of

masks = st.lists(st.booleans(), min_size=1, max_size=40)


def _placement(mask: list[bool]) -> Placement:
    return Placement(offset=0, length=len(mask), runs=runs_of(mask))


def test_rows_of_a_range_skip_the_tokens_that_take_no_embedding():
    assert _placement([False, True, False, True, True]).embeds_in(3, 5) == (1, 3)


def test_a_range_of_special_tokens_alone_consumes_no_rows():
    assert _placement([False, True, False, False]).embeds_in(2, 4) == (1, 1)


@given(masks, st.data())
def test_chunks_together_consume_exactly_the_rows_of_one_shot(mask, data):
    placement = _placement(mask)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(mask)), max_size=6)) | {0, len(mask)})
    rows = [
        row for lo, hi in zip(cuts, cuts[1:], strict=False) for row in range(*placement.embeds_in(lo, hi))
    ]
    assert rows == list(range(sum(mask)))
    assert placement.num_embeds() == sum(mask)


@given(masks)
def test_runs_describe_the_mask(mask):
    runs = runs_of(mask)
    rebuilt = [False] * len(mask)
    for start, count in ((0, len(mask)),) if runs is None else runs:
        rebuilt[start : start + count] = [True] * count
    assert rebuilt == mask


def test_a_range_outside_the_span_consumes_nothing():
    lo, hi = Placement(offset=4, length=3).embeds_in(5, 9)
    assert lo == hi


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 240), ("bfloat16", 120), ("float16", 120)])
def test_bytes_of_a_plan_follow_its_dtype(dtype, nbytes):
    plan = ItemPlan("0" * 64, "1" * 64, "image", rows=3, width=20, dtype=dtype, length=3)
    assert plan.nbytes == nbytes
