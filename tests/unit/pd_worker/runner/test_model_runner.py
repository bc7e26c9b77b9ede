"""Chunks of a step with NaN or infinity are found."""

from __future__ import annotations

import pytest
import torch

from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache
from triptych.pd_worker.runner.model_runner import check_projection, non_finite_chunks

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("bad", "counts", "non_finite"),
    [
        ({}, [1, 1, 4], []),
        ({1: NAN}, [1, 1, 4], [1]),
        ({0: INF, 5: -INF}, [1, 1, 4], [0, 2]),
        ({2: NAN}, [6], [0]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_chunk_with_one_value_that_is_no_number_is_spoiled(bad, counts, non_finite, dtype):
    hidden = torch.ones(6, 8, dtype=dtype)
    for row, value in bad.items():
        hidden[row, 3] = value
    assert non_finite_chunks(hidden, counts) == non_finite


def test_values_whose_sum_leaves_the_range_are_numbers_all_the_same():
    assert non_finite_chunks(torch.full((64, 4096), 3.0e38), [64]) == []


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_key_that_overflows_in_half_precision_spoils_its_chunk_though_its_row_is_a_number(name, bad):
    cache = PagedKVCache(
        num_layers=2,
        num_blocks=2,
        block_size=4,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.float16,
        device=torch.device("cpu"),
    )
    slots, fine = torch.arange(6), torch.ones(6, 2, 4, dtype=torch.float16)
    poor = fine.clone()
    poor[3, 1, 2] = bad
    cache.watch(6)
    cache.write(0, slots, **{"key": fine, "value": fine, name: poor})
    cache.write(1, slots, fine, fine)
    hidden = torch.ones(6, 8, dtype=torch.float16)
    assert non_finite_chunks(hidden, [1, 1, 4], cache.finite) == [2]
    cache.watch(6)
    cache.write(0, slots, fine, fine)
    assert non_finite_chunks(hidden, [1, 1, 4], cache.finite) == []


@pytest.mark.parametrize("place", ["key", "value"])
def test_cross_keys_and_values_must_be_numbers(place):
    parts = {"key": torch.ones(3, 2, 4), "value": torch.ones(3, 2, 4)}
    check_projection(**parts)
    parts[place][2, 1, 0] = NAN
    with pytest.raises(ArithmeticError, match="--dtype"):
        check_projection(**parts)
