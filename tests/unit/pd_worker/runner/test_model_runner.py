"""Chunks of a step: NaN or infinity is found, pooled ones become one vector."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache
from triptych.pd_worker.core.sampling import Pooling
from triptych.pd_worker.runner.model_runner import check_projection, non_finite_chunks
from triptych.pd_worker.runner.pooler import add_chunk, add_chunks, finish, score

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


HIDDEN = torch.randn(9, 16, generator=torch.Generator().manual_seed(3))


def state(pooling: Pooling | None) -> Any:
    return SimpleNamespace(request=SimpleNamespace(pooling=pooling), pooled_rows=None)


def chunk(of: Any, start: int, end: int) -> Any:
    return SimpleNamespace(state=of, start=start, end=end, count=end - start, pools=end == len(HIDDEN))


@pytest.mark.parametrize("cuts", [[(0, 9)], [(0, 4), (4, 9)], [(0, 4), (0, 6), (4, 9)], [(0, 4), (0, 9)]])
@pytest.mark.parametrize("method", ["last", "mean", "cls"])
def test_a_chunk_that_is_computed_again_counts_once(method, cuts):
    request = state(Pooling(method))
    vectors = [add_chunk(chunk(request, *cut), HIDDEN[slice(*cut)]) for cut in cuts]
    assert [vector is None for vector in vectors] == [end < 9 for _, end in cuts]
    expected = {"last": HIDDEN[-1], "mean": HIDDEN.mean(0), "cls": HIDDEN[0]}[method]
    torch.testing.assert_close(vectors[-1], expected)


def test_what_is_kept_does_not_change_with_the_step_s_buffer():
    request, buffer = state(Pooling("cls")), HIDDEN.clone()
    add_chunk(chunk(request, 0, 4), buffer[:4])
    buffer.zero_()
    torch.testing.assert_close(add_chunk(chunk(request, 4, 9), HIDDEN[4:]), HIDDEN[0])


def test_only_requests_with_a_complete_vector_have_one():
    whole, part, generates = state(Pooling(normalize=False)), state(Pooling()), state(None)
    batch = [chunk(generates, 8, 9), chunk(whole, 0, 9), chunk(part, 0, 5)]
    hidden = torch.cat([HIDDEN[8:], HIDDEN, HIDDEN[:5]])
    made = add_chunks(batch, hidden)
    assert made.keys() == {id(batch[1])}
    np.testing.assert_array_equal(np.frombuffer(made[id(batch[1])], "<f4"), HIDDEN[-1].numpy())


def test_a_vector_is_cut_before_its_length_becomes_one():
    given = np.frombuffer(finish(HIDDEN[0], Pooling(dimensions=4)), "<f4")
    cut = HIDDEN[0][:4].numpy()
    np.testing.assert_allclose(given, cut / np.linalg.norm(cut), rtol=1e-6)


@pytest.mark.parametrize(("ids", "odds"), [((2, 5), 3.0), ((2,), 4.0), ((), 7.0)])
def test_a_score_is_the_sigmoid_of_two_logits_of_one_or_of_the_head(ids, odds):
    logits = torch.tensor([7.0, 0.0, 4.0, 0.0, 0.0, 1.0])
    given = np.frombuffer(score(logits, Pooling(scores=True, score_ids=ids)), "<f4")
    np.testing.assert_allclose(given, [1 / (1 + np.exp(-odds))], rtol=1e-6)
