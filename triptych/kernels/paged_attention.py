"""Attention over a paged KV cache, in Triton: decodes split over their keys, and chunks of prompts.

One kernel for all of it. A program computes one tile of queries of one sequence for one kv head: the query
heads that share keys are rows of the tile. It reads keys and values in their blocks, as the block table says,
and nothing beyond a sequence's length: what lies there may be NaN.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

#: Parts that a decode's keys are split into at most, and the keys that a part has at least.
_MAX_PARTS, _PART_KEYS = 32, 256


@dataclass(frozen=True, slots=True)
class PagedQueries:
    """The queries of some sequences, one behind the other: tokens `starts[i]` to `starts[i + 1]` of the i-th.

    `lengths` [S] count a sequence's keys, in the blocks of `tables` [S, blocks]; with causal attention its
    last query is at its last key. `longest` is the largest number of queries of one sequence. `spans` [T, 2],
    where tokens attend both ways: the positions from and to which each token does; 0 and 0 for the others.
    Keys of few sequences are split between the `processors` of the device, where there are any; then the i-th
    sequence's only query is token i.
    """

    starts: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    longest: int
    spans: torch.Tensor | None = None
    processors: int = 0


@dataclass(frozen=True, slots=True)
class PagedScores:
    """How scores are made, and which keys count.

    `bias` is added to them: [heads, distances] of a key that many positions before its query, the last value
    for all beyond; or [heads, queries, keys] of positions. `window` and `chunk` limit how far back a query
    reaches, 0: not at all; `whole_spans`: they do not limit spans. Without `causal` all keys count.
    `sinks` [heads], float32, are the scores of one more key each, whose value is zero.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    chunk: int = 0
    causal: bool = True
    whole_spans: bool = False
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


#: Options of a launch that `make gpu` measures, in place of tuning at run time. "default" is Triton's own.
LAUNCHES: Mapping[str, Mapping[str, int]] = {
    "default": {},
    "8 warps": {"num_warps": 8, "num_stages": 3},
    "2 stages": {"num_warps": 4, "num_stages": 2},
}


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: PagedQueries,
    scores: PagedScores,
    out: torch.Tensor,
    launch: Mapping[str, int] = LAUNCHES["default"],
) -> None:
    """Writes the rows of `out` [T, heads, value dim] that `queries` names, of query [T, heads, dim].

    `keys` and `values` are [blocks, block size, kv heads, dim].
    """
    (_, heads, dim), (_, page, kv_heads, value_dim) = query.shape, values.shape
    query = query if query.stride(-1) == 1 else query.contiguous()
    assert keys.stride(-1) == values.stride(-1) == out.stride(-1) == 1
    sizes = tile_sizes(heads // kv_heads, dim, value_dim, queries.longest, query.element_size())
    tiles = triton.cdiv(queries.longest, sizes["BLOCK_M"] // (heads // kv_heads))
    count, capacity = len(queries.lengths), queries.tables.shape[1] * page
    # Some programs for each processor. It depends on shapes alone, as in a graph it must.
    parts = triton.cdiv(2 * queries.processors, count * kv_heads)
    parts = max(1, min(parts, _MAX_PARTS, triton.cdiv(capacity, _PART_KEYS)))
    assert parts == 1 or queries.longest == 1
    to, sums = out[:, :, None], out
    if parts > 1:
        to = torch.empty(count, heads, parts, value_dim, dtype=torch.float32, device=query.device)
        sums = to.new_empty(count, heads, parts)
    bias, spans, sinks = scores.bias, queries.spans, scores.sinks
    bias_sizes = (0, 0, 0) if bias is None else (bias.stride(0), bias.stride(1), bias.shape[1])
    _attend[(count * tiles, kv_heads, parts)](
        query, keys, values, to, sums,
        queries.tables, queries.lengths, queries.starts,
        queries.starts if spans is None else spans, query if bias is None else bias,
        out if sinks is None else sinks,
        scores.scale, scores.softcap, scores.window, scores.chunk, tiles,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *to.stride()[:3],
        queries.tables.stride(0), *bias_sizes,
        GROUP=heads // kv_heads, DIM=dim, VALUE_DIM=value_dim, PAGE=page,
        CAUSAL=scores.causal, WINDOW=scores.window > 0, CHUNK=scores.chunk > 0, SOFTCAP=scores.softcap > 0,
        BIAS=0 if bias is None else bias.dim() - 1, SPANS=spans is not None, WHOLE=scores.whole_spans,
        SINKS=sinks is not None, SPLIT=parts > 1, **sizes, **launch,
    )  # fmt: skip
    if parts > 1:
        _merge[(count, heads)](
            to, sums, out, queries.starts, parts, *to.stride()[:2], *sums.stride()[:2], *out.stride()[:2],
            VALUE_DIM=value_dim, BLOCK_V=sizes["BLOCK_V"], PARTS=_MAX_PARTS,
        )  # fmt: skip


def tile_sizes(group: int, dim: int, value_dim: int, longest: int, itemsize: int) -> dict[str, int]:
    """Sizes of a program: query rows, keys of one turn, widths; within the shared memory of small GPUs."""
    row = max(16, triton.next_power_of_2(max(dim, value_dim))) * itemsize
    # Products in float32 are not for tensor cores: they need a register for each element.
    tile = 16 if row > 512 else 32 if row > 256 or itemsize == 4 else 64
    return {
        "BLOCK_M": max(16 if longest == 1 else tile, triton.next_power_of_2(group)),
        "BLOCK_N": tile,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_V": max(16, triton.next_power_of_2(value_dim)),
    }


#: What differs between steps and layers, numbers and alignments, for which nothing is to be compiled again.
_VARYING = [
    "tables", "lengths", "starts", "spans", "window", "chunk", "tiles", "table_stride", "bias_length",
    "bias_query", "bias_head",
]  # fmt: skip


@triton.jit
def _reach(
    span_first, span_last, length, earliest, latest, window, chunk,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SPANS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The keys [low, high) of which queries at the positions from `earliest` to `latest` reach any."""
    low, high = length * 0, length
    if CAUSAL:
        high = tl.minimum(length, latest + 1)
        if WINDOW:
            low = tl.maximum(low, earliest - window + 1)
        if CHUNK:
            low = tl.maximum(low, earliest // chunk * chunk)
        if SPANS:
            high = tl.maximum(high, tl.max(span_last, 0))
        if SPANS and WHOLE:
            low = tl.minimum(low, tl.min(tl.where(span_last > 0, span_first, length), 0))
    return low, high


@triton.jit
def _allowed(
    n, position, span_first, span_last, allowed, window, chunk,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SPANS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """`allowed` [queries, keys], of which causal attention leaves keys `n` of queries at `position`."""
    key, query = n[None, :], position[:, None]
    behind, near = key <= query, allowed
    if WINDOW:
        near = near & (key > query - window)
    if CHUNK:
        near = near & (key // chunk == query // chunk)
    if SPANS:
        both = (key >= span_first[:, None]) & (key < span_last[:, None])
        if WHOLE:
            return allowed & ((behind & near) | both)
        else:
            return (behind | both) & near
    else:
        return behind & near


@triton.jit
def _added(bias, head, n, position, allowed, head_stride, query_stride, length, BIAS: tl.constexpr):
    """The bias [queries, keys]: by distance, or by both positions."""
    if BIAS == 1:
        at = tl.minimum(tl.maximum(position[:, None] - n[None, :], 0), length - 1)
    else:
        at = position[:, None] * query_stride + n[None, :]
    return tl.load(bias + head[:, None] * head_stride + at, mask=allowed, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=_VARYING)
def _attend(
    query, keys, values, out, sums, tables, lengths, starts, spans, bias, sinks,
    scale, softcap, window, chunk, tiles,
    query_token, query_head, key_block, key_slot, key_head, value_block, value_slot, value_head,
    out_token, out_head, out_part, table_stride, bias_head, bias_query, bias_length,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, SPANS: tl.constexpr, WHOLE: tl.constexpr, SINKS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one sequence, for one kv head, over one part of its keys."""
    sequence, first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * (BLOCK_M // GROUP)
    kv_head, part, parts = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    start, length = tl.load(starts + sequence).to(tl.int32), tl.load(lengths + sequence).to(tl.int32)
    count = tl.load(starts + sequence + 1).to(tl.int32) - start
    if first >= count:
        return
    m, d, v = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    row, head = first + m // GROUP, kv_head * GROUP + m % GROUP
    valid, position = (row < count) & (m < BLOCK_M // GROUP * GROUP), length - count + row
    token = (start + row).to(tl.int64)
    q_at = token[:, None] * query_token + head[:, None] * query_head + d[None, :]
    q = tl.load(query + q_at, mask=valid[:, None] & (d < DIM)[None, :], other=0.0)
    span_first, span_last = position, position
    if SPANS:
        span_first = tl.load(spans + token * 2, mask=valid, other=0).to(tl.int32)
        span_last = tl.load(spans + token * 2 + 1, mask=valid, other=0).to(tl.int32)
    earliest = length - count + first
    latest = earliest + BLOCK_M // GROUP - 1
    low, high = _reach(
        span_first, span_last, length, earliest, latest, window, chunk, CAUSAL, WINDOW, CHUNK, SPANS, WHOLE
    )
    # This program's part of the keys, in whole turns.
    turns = tl.cdiv(tl.cdiv(high - low, BLOCK_N), parts)
    low += part * turns * BLOCK_N
    high = tl.minimum(high, low + turns * BLOCK_N)
    largest, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        # The first part counts them.
        sink = tl.load(sinks + head, mask=valid, other=0.0) * 1.4426950408889634
        largest = tl.where(part == 0, sink, largest)
        total = tl.where(part == 0, total + 1.0, total)
    result = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for turn in range(low, high, BLOCK_N):
        n = turn + tl.arange(0, BLOCK_N)
        inside = n < high
        block = tl.load(tables + sequence * table_stride + n // PAGE, mask=inside, other=0).to(tl.int64)
        k_at = block * key_block + n % PAGE * key_slot + kv_head * key_head
        k = tl.load(keys + k_at[None, :] + d[:, None], mask=inside[None, :] & (d < DIM)[:, None], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale
        if SOFTCAP:
            # The hyperbolic tangent.
            score = softcap * (1.0 - 2.0 / (tl.exp(score * (2.0 / softcap)) + 1.0))
        allowed = valid[:, None] & inside[None, :]
        if CAUSAL:
            allowed = _allowed(
                n, position, span_first, span_last, allowed, window, chunk, WINDOW, CHUNK, SPANS, WHOLE
            )
        if BIAS:
            score += _added(bias, head, n, position, allowed, bias_head, bias_query, bias_length, BIAS)
        score = tl.where(allowed, score * 1.4426950408889634, float("-inf"))
        now = tl.maximum(largest, tl.max(score, 1))
        # Where no key counts so far, the sums stay zero.
        safe = tl.where(now == float("-inf"), 0.0, now)
        weight, shrink = tl.exp2(score - safe[:, None]), tl.exp2(largest - safe)
        total = total * shrink + tl.sum(weight, 1)
        v_at = block * value_block + n % PAGE * value_slot + kv_head * value_head
        value_mask = inside[:, None] & (v < VALUE_DIM)[None, :]
        value = tl.load(values + v_at[:, None] + v[None, :], mask=value_mask, other=0.0)
        result = tl.dot(weight.to(value.dtype), value, result * shrink[:, None], input_precision="ieee")
        largest = now
    divisor = tl.where(total == 0.0, 1.0, total)
    o_at = token[:, None] * out_token + head[:, None] * out_head + part * out_part + v[None, :]
    o_mask = valid[:, None] & (v < VALUE_DIM)[None, :]
    tl.store(out + o_at, (result / divisor[:, None]).to(out.dtype.element_ty), mask=o_mask)
    if SPLIT:
        log_sum = tl.where(total == 0.0, float("-inf"), largest + tl.log2(divisor))
        # Laid out as `out`, without its width.
        tl.store(sums + (token * out_token + head * out_head) // VALUE_DIM + part, log_sum, mask=valid)


@triton.jit(do_not_specialize=["parts"])
def _merge(
    partial, sums, out, starts, parts,
    partial_token, partial_head, sum_token, sum_head, out_token, out_head,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One token's parts by their shares of the scores."""
    token, head = tl.load(starts + tl.program_id(0)).to(tl.int64), tl.program_id(1)
    part, v = tl.arange(0, PARTS), tl.arange(0, BLOCK_V)
    known = part < parts
    log_sum = tl.load(sums + token * sum_token + head * sum_head + part, mask=known, other=float("-inf"))
    weight = tl.exp2(log_sum - tl.max(log_sum, 0))
    at = token * partial_token + head * partial_head + part[:, None] * VALUE_DIM + v[None, :]
    mask = known[:, None] & (v < VALUE_DIM)[None, :]
    result = tl.sum(tl.load(partial + at, mask=mask, other=0.0) * weight[:, None], 0) / tl.sum(weight, 0)
    o_at = token * out_token + head * out_head + v
    tl.store(out + o_at, result.to(out.dtype.element_ty), mask=v < VALUE_DIM)
