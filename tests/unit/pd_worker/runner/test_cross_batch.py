"""What a batch's arrays say of cross tables, by a hand-made example."""

from __future__ import annotations

import torch

from support.engine.engine_requests import bare_decoder, make_cross, make_request
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache
from triptych.pd_worker.core.kv_cache.prefix_chain import PrefixChain
from triptych.pd_worker.core.outputs import ScheduledChunk
from triptych.pd_worker.core.request import RequestState
from triptych.pd_worker.runner.batch import BatchBuilder


def chunk(name: str, rows: int, start: int, count: int, own: tuple[int, ...], cross: tuple[int, ...]):
    request = make_request(name, [2, 0, 7, 8], [make_cross(name, rows)])
    state = RequestState(request, PrefixChain(b"r", request.prompt_token_ids, [], (), 2))
    return ScheduledChunk(state, start, count, own, (), False, cross, rows)


def cache(num_blocks: int = 12) -> PagedKVCache:
    return PagedKVCache(
        num_layers=1, num_blocks=num_blocks, block_size=2, num_kv_heads=1, head_dim=1,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


def test_two_requests_of_three_and_five_rows_in_blocks_of_two() -> None:
    builder = BatchBuilder(cache(), bare_decoder())
    decode = [chunk("a", 3, 3, 1, (4, 9), (1, 5)), chunk("b", 5, 2, 1, (3, 8), (0, 2, 7))]
    batch = builder.build(decode, {})
    cross = batch.attention.cross
    assert cross is not None and cross.prefills == [] and cross.decode_padded
    assert cross.decode_tables.tolist() == [[1, 5, 1], [0, 2, 7]]
    assert cross.decode_lengths.tolist() == [3, 5]
    assert batch.attention.slots.tolist() == [9 * 2 + 1, 8 * 2]
    assert batch.attention.cross_mask() is not None
    assert batch.attention.cross_mask()[:, 0, 0].tolist() == [
        [True, True, True, False, False, False],
        [True, True, True, True, True, False],
    ]
    assert batch.merged is None, "no encoder row is written over a token"


def test_a_prefill_takes_its_table_and_its_rows_along() -> None:
    builder = BatchBuilder(cache(), bare_decoder())
    batch = builder.build([chunk("a", 3, 3, 1, (4, 9), (1, 5)), chunk("b", 5, 0, 4, (3, 8), (0, 2, 7))], {})
    cross = batch.attention.cross
    assert cross is not None
    assert [(span.table.tolist(), span.rows, span.first) for span in cross.prefills] == [([0, 2, 7], 5, None)]
    assert batch.token_ids.tolist() == [8, 2, 0, 7, 8]


def test_the_slots_of_a_projection_follow_its_blocks() -> None:
    assert cache().slots((5, 0, 7), 5).tolist() == [10, 11, 0, 1, 14]


def test_decodes_on_one_output_read_it_together_and_in_place_where_its_blocks_follow_one_another() -> None:
    builder = BatchBuilder(cache(), bare_decoder())
    shared, other = (6, 7, 8), (0, 2)
    decodes = [
        chunk("a", 5, 3, 1, (4, 9), shared),
        chunk("b", 3, 3, 1, (3, 5), other),
        chunk("a", 5, 2, 1, (10, 11), shared),
    ]
    cross = builder.build(decodes, {}).attention.cross
    assert cross is not None
    spans = [(span.tokens.tolist(), span.rows, span.first) for span in cross.decodes]
    assert spans == [([0, 2], 5, 6), ([1], 3, None)]


def test_the_last_token_of_a_span_is_no_decode_though_it_is_computed_alone() -> None:
    """It attends to the span, which a window may cut for a decode."""
    request = make_request("a", list(range(8)))
    request.both_ways = ((2, 6),)
    state = RequestState(request, PrefixChain(b"r", request.prompt_token_ids, [], (), 2))
    chunks = [ScheduledChunk(state, at, 1, (0, 1, 2, 3), (), False, (), 0) for at in (5, 6)]
    attention = BatchBuilder(cache(), bare_decoder()).build(chunks, {}).attention
    assert attention.num_decodes == 1
    assert [(span.start, span.end, span.atomic) for span in attention.prefills] == [(5, 6, ((2, 6),))]
