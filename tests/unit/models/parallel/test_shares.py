"""The numbers of each rank's share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.models.base import CrossGeometry, DecoderGeometry
from triptych.models.parallel import plan as shares
from triptych.models.parallel.plan import ShardPlan, possible_sizes
from triptych.models.parallel.tensor_parallel import TensorParallel


@given(count=st.integers(16, 4000), size=st.integers(1, 16))
def test_each_column_belongs_to_one_rank_and_ranks_differ_by_one_unit(count: int, size: int) -> None:
    bounds = [shares.columns(count, rank, size) for rank in range(size)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(left[1] == right[0] for left, right in zip(bounds, bounds[1:], strict=False))
    counts = [last - first for first, last in bounds]
    unit = 16 if count >= 16 * size else 1
    assert all(number % unit == 0 for number in counts[:-1])
    assert min(counts) > 0
    assert max(counts) - min(counts) < 2 * unit


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("groups", [1, 2, 3, 6, 7])
def test_a_rank_has_the_kv_heads_that_its_heads_read(groups: int, kv_heads: int) -> None:
    plan = ShardPlan((), groups * kv_heads, kv_heads)
    for size in possible_sizes(plan.heads, kv_heads):
        for rank in range(size):
            first, last = shares.heads(plan, rank, size)
            kv_first, kv_last = shares.kv_heads(plan, rank, size)
            # As attention finds them: the same number of heads, one behind the other, for each KV head.
            each = (last - first) // (kv_last - kv_first)
            read = [kv_first + index // each for index in range(last - first)]
            assert read == [head // groups for head in range(first, last)]
            assert set(read) == set(range(kv_first, kv_last))


def test_a_ranks_geometry_counts_its_heads_and_keeps_all_else() -> None:
    whole = DecoderGeometry(3, 8, 2, 16, 64, 768, 3, 4096, 2)
    cross = CrossGeometry(3, 8, 16, 64, 1500)
    assert shares.geometry_of_rank(whole, TensorParallel(1, 2)) == DecoderGeometry(
        3, 4, 1, 16, 64, 768, 3, 4096, 2
    )
    assert shares.geometry_of_rank(whole, TensorParallel(3, 4)).num_kv_heads == 1
    assert shares.cross_of_rank(cross, TensorParallel(1, 4)) == CrossGeometry(3, 2, 16, 64, 1500)
