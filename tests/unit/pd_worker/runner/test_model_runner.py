"""The model runner, and batches with cross-attention."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.engine.engine_requests import bare_decoder, make_cross, make_request
from support.graphs import Operators
from triptych.pd_worker.attention.metadata import PagedKVCache
from triptych.pd_worker.core.kv_cache.block_pool import PrefixChain
from triptych.pd_worker.core.kv_cache.kv_cache_manager import BlockCopy
from triptych.pd_worker.core.outputs import ScheduledChunk
from triptych.pd_worker.core.request import RequestState
from triptych.pd_worker.core.sampling import Pooling
from triptych.pd_worker.runner.batch import BatchBuilder
from triptych.pd_worker.runner.host_kv_cache import HostKVCache, copy_blocks
from triptych.pd_worker.runner.model_runner import check_projection, non_finite_chunks
from triptych.pd_worker.runner.pooler import add_chunk, add_chunks, finish, score

NAN, INF = float("nan"), float("inf")


def cache(
    num_blocks: int = 12, layers: int = 1, heads: int = 1, dim: int = 1, dtype: torch.dtype = torch.float32
) -> PagedKVCache:
    """A cache with blocks of two tokens."""
    return PagedKVCache(
        num_layers=layers, num_blocks=num_blocks, block_size=2, num_kv_heads=heads, head_dim=dim,
        dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip


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
    written = cache(4, layers=2, heads=2, dim=4, dtype=torch.float16)
    slots, fine = torch.arange(6), torch.ones(6, 2, 4, dtype=torch.float16)
    poor = fine.clone()
    poor[3, 1, 2] = bad
    written.watch(6)
    written.write(0, slots, **{"key": fine, "value": fine, name: poor})
    written.write(1, slots, fine, fine)
    hidden = torch.ones(6, 8, dtype=torch.float16)
    assert non_finite_chunks(hidden, [1, 1, 4], written.finite) == [2]
    written.watch(6)
    written.write(0, slots, fine, fine)
    assert non_finite_chunks(hidden, [1, 1, 4], written.finite) == []


@pytest.mark.parametrize("place", ["key", "value"])
def test_cross_keys_and_values_must_be_numbers(place):
    parts = {"key": torch.ones(3, 2, 4), "value": torch.ones(3, 2, 4)}
    check_projection(**parts)
    parts[place][2, 1, 0] = NAN
    with pytest.raises(ArithmeticError, match="--dtype"):
        check_projection(**parts)


HIDDEN = torch.randn(9, 16, generator=torch.Generator().manual_seed(3))


def halves(hidden: torch.Tensor) -> torch.Tensor:
    """Stands for a retriever's head."""
    return hidden[:, :8] / 2


def state(pooling: Pooling | None) -> Any:
    return SimpleNamespace(request=SimpleNamespace(pooling=pooling), pooled_rows=None)


def chunk(of: Any, start: int, end: int) -> Any:
    return SimpleNamespace(state=of, start=start, end=end, count=end - start, pools=end == len(HIDDEN))


@pytest.mark.parametrize("cuts", [[(0, 9)], [(0, 4), (4, 9)], [(0, 4), (0, 6), (4, 9)], [(0, 4), (0, 9)]])
@pytest.mark.parametrize("method", ["last", "mean", "cls", "token"])
def test_a_chunk_that_is_computed_again_counts_once(method, cuts):
    request = state(Pooling(method))
    vectors = [add_chunk(chunk(request, *cut), HIDDEN[slice(*cut)], halves) for cut in cuts]
    assert [vector is None for vector in vectors] == [end < 9 for _, end in cuts]
    known = {"last": HIDDEN[-1], "mean": HIDDEN.mean(0), "cls": HIDDEN[0], "token": halves(HIDDEN)}
    expected = known[method]
    torch.testing.assert_close(vectors[-1], expected)


def test_what_is_kept_does_not_change_with_the_step_s_buffer():
    request, buffer = state(Pooling("cls")), HIDDEN.clone()
    add_chunk(chunk(request, 0, 4), buffer[:4], halves)
    buffer.zero_()
    torch.testing.assert_close(add_chunk(chunk(request, 4, 9), HIDDEN[4:], halves), HIDDEN[0])


def test_only_requests_with_a_complete_vector_have_one():
    whole, part, generates = state(Pooling(normalize=False)), state(Pooling()), state(None)
    tokens = state(Pooling("token", normalize=False))
    batch = [chunk(generates, 8, 9), chunk(whole, 0, 9), chunk(part, 0, 5), chunk(tokens, 0, 9)]
    hidden = torch.cat([HIDDEN[8:], HIDDEN, HIDDEN[:5], HIDDEN])
    made = add_chunks(batch, hidden, halves)
    assert made.keys() == {id(batch[1]), id(batch[3])}
    np.testing.assert_array_equal(np.frombuffer(made[id(batch[1])], "<f4"), HIDDEN[-1].numpy())
    vectors = np.frombuffer(made[id(batch[3])], "<f4").reshape(9, 8)
    np.testing.assert_array_equal(vectors, halves(HIDDEN).numpy())


def test_a_vector_is_cut_before_its_length_becomes_one():
    given = np.frombuffer(finish(HIDDEN[0], Pooling(dimensions=4)), "<f4")
    cut = HIDDEN[0][:4].numpy()
    np.testing.assert_allclose(given, cut / np.linalg.norm(cut), rtol=1e-6)


def test_vectors_are_cut_before_their_lengths_become_one_and_compared_after():
    query = torch.nn.functional.normalize(torch.randn(600, 4, generator=torch.Generator().manual_seed(1)))
    document = torch.nn.functional.normalize(HIDDEN[:, :4])
    given = np.frombuffer(finish(HIDDEN, Pooling("token", dimensions=4)), "<f4").reshape(9, 4)
    np.testing.assert_allclose(given, document.numpy(), rtol=1e-6)
    pooling = Pooling("token", dimensions=4, query=query.numpy().tobytes())
    (compared,) = np.frombuffer(finish(HIDDEN, pooling), "<f4")
    np.testing.assert_allclose(compared, (query @ document.T).amax(1).sum().numpy(), rtol=1e-5)


@pytest.mark.parametrize(("ids", "odds"), [((2, 5), 3.0), ((2,), 4.0), ((), 7.0)])
def test_a_score_is_the_sigmoid_of_two_logits_of_one_or_of_the_head(ids, odds):
    logits = torch.tensor([7.0, 0.0, 4.0, 0.0, 0.0, 1.0])
    given = np.frombuffer(score(logits, Pooling(scores=True, score_ids=ids)), "<f4")
    np.testing.assert_allclose(given, [1 / (1 + np.exp(-odds))], rtol=1e-6)


def cross_chunk(name: str, rows: int, start: int, count: int, own: tuple[int, ...], cross: tuple[int, ...]):
    request = make_request(name, [2, 0, 7, 8], [make_cross(name, rows)])
    state = RequestState(request, PrefixChain(b"r", request.prompt_token_ids, [], (), 2))
    return ScheduledChunk(state, start, count, own, (), False, cross, rows)


def test_two_requests_of_three_and_five_rows_in_blocks_of_two() -> None:
    builder = BatchBuilder(cache(), bare_decoder())
    decode = [cross_chunk("a", 3, 3, 1, (4, 9), (1, 5)), cross_chunk("b", 5, 2, 1, (3, 8), (3, 2, 7))]
    batch = builder.build(decode, {})
    cross = batch.attention.cross
    assert cross is not None and cross.prefills == [] and cross.decode_blocks == [2, 3]
    assert cross.decode_tables.tolist() == [[1, 5, 1], [3, 2, 7]]
    assert cross.decode_lengths.tolist() == [3, 5]
    assert batch.attention.slots.tolist() == [9 * 2 + 1, 8 * 2]
    assert batch.attention.cross_mask()[:, 0, 0].tolist() == [
        [True, True, True, False, False, False],
        [True, True, True, True, True, False],
    ]
    assert batch.merged is None, "no encoder row is written over a token"


def test_a_prefill_takes_its_table_and_its_rows_along() -> None:
    builder = BatchBuilder(cache(), bare_decoder())
    batch = builder.build(
        [cross_chunk("a", 3, 3, 1, (4, 9), (1, 5)), cross_chunk("b", 5, 0, 4, (3, 8), (0, 2, 7))], {}
    )
    cross = batch.attention.cross
    assert [(span.table.tolist(), span.rows) for span in cross.prefills] == [([0, 2, 7], 5)]
    assert batch.token_ids.tolist() == [8, 2, 0, 7, 8]


def test_the_slots_of_a_projection_follow_its_blocks() -> None:
    assert cache().slots((5, 0, 7), 5).tolist() == [10, 11, 0, 1, 14]


def test_decodes_on_one_encoder_output_are_side_by_side() -> None:
    shared, other = (6, 7, 8), (0, 2)
    decodes = [
        cross_chunk("a", 5, 3, 1, (4, 9), shared),
        cross_chunk("b", 3, 3, 1, (3, 5), other),
        cross_chunk("a", 5, 2, 1, (10, 11), shared),
    ]
    cross = BatchBuilder(cache(), bare_decoder()).build(decodes, {}).attention.cross
    assert cross.decode_tables.tolist() == [[0, 2, 0], [*shared], [*shared]]


def test_the_last_token_of_a_span_is_no_decode_though_it_is_computed_alone() -> None:
    """It attends to the span, which a window may cut for a decode."""
    request = make_request("a", list(range(8)))
    request.both_ways = ((2, 6),)
    state = RequestState(request, PrefixChain(b"r", request.prompt_token_ids, [], (), 2))
    chunks = [ScheduledChunk(state, at, 1, (0, 1, 2, 3), (), False, (), 0) for at in (5, 6)]
    attention = BatchBuilder(cache(), bare_decoder()).build(chunks, {}).attention
    assert attention.num_decodes == 1
    assert [(span.start, span.end, span.atomic) for span in attention.prefills] == [(5, 6, ((2, 6),))]


def filled_cache(num_blocks: int, dtype: torch.dtype = torch.float32, layers: int = 3) -> PagedKVCache:
    """Layer `l`, block `b`, its keys: 100 * l + b; its values the same with the other sign."""
    made = cache(num_blocks, layers, heads=2, dim=4, dtype=dtype)
    for layer, (keys, values) in enumerate(zip(made.keys, made.values, strict=True)):
        numbers = 100 * layer + torch.arange(num_blocks, dtype=dtype)[:, None, None, None]
        keys.copy_(numbers.expand_as(keys))
        values.copy_(-numbers.expand_as(values))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, 16, 17, 40])
def test_blocks_come_back_as_they_went(count: int, dtype: torch.dtype) -> None:
    rng = random.Random(count)
    cache, before = filled_cache(64, dtype), filled_cache(64, dtype)
    host = HostKVCache(cache, 48)
    sources, places = rng.sample(range(64), count), rng.sample(range(48), count)
    copy_blocks(cache, host, [BlockCopy(*pair) for pair in zip(sources, places, strict=True)])
    host.wait()
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(7)
    targets = rng.sample(range(64), count)
    copy_blocks(host, cache, [BlockCopy(*pair) for pair in zip(places, targets, strict=True)])
    for now, then in zip((*cache.keys, *cache.values), (*before.keys, *before.values), strict=True):
        assert torch.equal(now[targets], then[sources])
        others = sorted(set(range(64)) - set(targets))
        assert (now[others] == 7).all(), "no other block is touched"


def test_neighbours_in_host_memory_are_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled_cache(16)
    host = HostKVCache(cache, 16)
    lengths: list[int] = []
    copy = torch.Tensor.copy_

    def counting(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if self.dim() == 2:  # rows, and not a block of the cache's
            lengths.append(len(self))
        return copy(self, source, non_blocking=non_blocking)

    monkeypatch.setattr(torch.Tensor, "copy_", counting)
    copies = [BlockCopy(source, target) for source, target in zip((9, 1, 4, 2), (3, 4, 5, 9), strict=True)]
    copy_blocks(cache, host, copies)
    assert lengths == [3, 1]
    lengths.clear()
    copy_blocks(host, cache, [BlockCopy(copy.target, copy.source) for copy in copies])
    assert lengths == [3, 1]


def test_more_layers_are_not_more_operators() -> None:
    copies = [BlockCopy(block, block) for block in range(40)]
    counts = set()
    for layers in (1, 36):
        cache = filled_cache(40, layers=layers)
        host = HostKVCache(cache, 40)
        with Operators() as operators:  # type: ignore[no-untyped-call]
            copy_blocks(cache, host, copies)
            copy_blocks(host, cache, copies)
        counts.add(operators.count)
    assert len(counts) == 1, "a launch for each layer is what a swap of few blocks takes its time for"


def test_no_host_memory_is_taken_without_swap() -> None:
    host = HostKVCache(filled_cache(4), 0)
    assert host.blocks.numel() == 0
    copy_blocks(filled_cache(4), host, [])
    host.close()
