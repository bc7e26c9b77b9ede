"""The CPU's kernel equals attention over all keys, wherever the blocks of a sequence are."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.engine.reference_attention import written_out
from triptych.kernels import cpu_attention as kernel
from triptych.models.geometry import LayerRule, SpanRule
from triptych.pd_worker.attention import attention, gathered_attention
from triptych.pd_worker.attention.metadata import AttentionMetadata, PagedKVCache, PrefillSpan

DIM, SCALE, BLOCKS = 16, 0.3, 900


class Sequences:
    """Sequences of (length, new tokens), decodes first, in a cache that holds rubbish elsewhere.

    `stretch` blocks of a table follow one another, then the next ones are elsewhere. The first `shared`
    blocks are the same for all.
    """

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        *,
        heads: tuple[int, int] = (4, 2),
        block_size: int = 4,
        stretch: int = 3,
        shared: int = 0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.sizes, self.block_size, self.dtype = sizes, block_size, dtype
        generator = torch.Generator().manual_seed(seed)
        self.cache = PagedKVCache(
            num_layers=1, num_blocks=BLOCKS, block_size=block_size, num_kv_heads=heads[1], head_dim=DIM,
            dtype=dtype, device=torch.device("cpu"),
        )  # fmt: skip
        for blocks in (*self.cache.keys, *self.cache.values):
            blocks.fill_(float("nan"))

        def draw(count: int, number: int) -> torch.Tensor:
            return torch.randn(count, number, DIM, generator=generator).to(dtype)

        free = [list(range(i, i + stretch)) for i in range(0, BLOCKS - stretch, stretch + 1)]
        random.Random(seed).shuffle(free)

        def take(count: int) -> list[int]:
            return [block for _ in range(-(-count // stretch)) for block in free.pop()][:count]

        common = take(shared)
        self.tables = [[*common, *take(-(-length // block_size) - shared)] for length, _ in sizes]
        prefix = [draw(shared * block_size, heads[1]) for _ in range(2)]
        self.queries = [draw(count, heads[0]) for _, count in sizes]
        self.own = [
            [torch.cat([part, draw(length - shared * block_size, heads[1])]) for part in prefix]
            for length, _ in sizes
        ]
        for table, (length, count), (key, value) in zip(self.tables, sizes, self.own, strict=True):
            slots = self.cache.slots(table, length - count)
            self.cache.write(0, slots, key[: length - count], value[: length - count])

    def attend(self, metadata: AttentionMetadata | None = None, **options: Any) -> torch.Tensor:
        module = torch.nn.Module()
        module.layer_idx = 0  # type: ignore[assignment]
        new = [[part[-count:] for part in own] for own, (_, count) in zip(self.own, self.sizes, strict=True)]
        key, value = (torch.cat(parts).transpose(0, 1)[None] for parts in zip(*new, strict=True))
        query = torch.cat(self.queries).transpose(0, 1)[None]
        metadata = metadata or self.metadata()
        out, _ = attention.paged_attention(
            module, query, key, value, None, scaling=SCALE, attn_metadata=metadata, **options
        )
        return out[0]

    def metadata(self) -> AttentionMetadata:
        size, slots, prefills = self.block_size, [], []
        for table, (length, count) in zip(self.tables, self.sizes, strict=True):
            start, at = length - count, len(slots)
            slots += [table[i // size] * size + i % size for i in range(start, length)]
            if count > 1:
                prefills.append(PrefillSpan(at, at + count, start, torch.tensor(table)))
        decodes = [table for table, (_, count) in zip(self.tables, self.sizes, strict=True) if count == 1]
        lengths = [length for length, count in self.sizes if count == 1]
        longest = max(map(len, decodes), default=0)
        return AttentionMetadata(
            cache=self.cache,
            slots=torch.tensor(slots),
            num_decodes=len(decodes),
            decode_tables=torch.tensor([[*t, *[t[0]] * (longest - len(t))] for t in decodes]),
            decode_lengths=torch.tensor(lengths),
            prefills=prefills,
            backend="cpu",
        )

    def expected(self, window: int | None = None) -> torch.Tensor:
        outputs = []
        for (length, count), query, own in zip(self.sizes, self.queries, self.own, strict=True):
            at, behind = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
            allowed = (behind <= at) & (behind > at - (window or length))
            key, value = (part.float() for part in own)
            outputs.append(written_out(query.float(), key, value, scale=SCALE, allowed=allowed))
        return torch.cat(outputs)


@pytest.fixture(autouse=True)
def gathered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the copies of keys and values that are gathered; a test that empties it expected them."""
    found: list[int] = []
    inner = gathered_attention._gather
    monkeypatch.setattr(gathered_attention, "_gather", lambda *args: found.append(1) or inner(*args))
    yield found
    assert not found


@pytest.mark.parametrize("stretch", [1, 3, 60], ids=["scattered", "short runs", "one run"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_decodes_and_chunks_equal_attention_over_all_keys(stretch: int, heads: tuple[int, int]) -> None:
    draw = random.Random(stretch)
    for seed in range(5):
        decodes = [(draw.choice([1, 2, 4, 5, 31, 32, 33, 64, 65, 130]), 1) for _ in range(draw.randrange(5))]
        chunks = [(length, draw.randrange(2, length + 1)) for length in (2, 4, 9, 40, 64, 131)]
        case = Sequences([*decodes, *chunks], heads=heads, stretch=stretch, seed=seed)
        torch.testing.assert_close(case.attend(), case.expected(), atol=2e-5, rtol=1e-4)


def test_sequences_that_share_a_prefix_read_the_same_blocks() -> None:
    case = Sequences([(30, 1), (33, 1), (25, 1), (60, 20)], shared=6, stretch=60)
    torch.testing.assert_close(case.attend(), case.expected(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 3, 4, 5, 29, 100])
def test_a_window_sees_the_last_tokens(window: int) -> None:
    case = Sequences([(1, 1), (7, 1), (30, 1), (9, 1), (64, 1), (100, 50)])
    torch.testing.assert_close(
        case.attend(sliding_window=window), case.expected(window), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("atomic", [(3, 15), (25, 28), (29, 35)])
@pytest.mark.parametrize(
    "rule",
    [
        LayerRule(),
        LayerRule(window=4),
        LayerRule(window=4, spans=SpanRule.CUT),
        LayerRule(chunk=8, spans=SpanRule.CUT),
        LayerRule(spans=SpanRule.NONE),
    ],
)
def test_tokens_that_attend_both_ways_do_so_as_far_as_the_mask_says(atomic, rule):
    case = Sequences([(12, 1), (30, 20)], stretch=60)
    metadata = case.metadata()
    (span,) = metadata.prefills
    metadata.prefills = [replace(span, atomic=(atomic,))]
    metadata.layer_rules = (rule,)
    allowed = metadata.prefill_mask(0, rule)
    alone = metadata.decode_mask(rule)
    parts = [
        written_out(query, own[0], own[1], scale=SCALE, allowed=mask)
        for query, own, mask in zip(case.queries, case.own, (alone[0, 0, :, :12], allowed), strict=True)
    ]
    torch.testing.assert_close(case.attend(metadata), torch.cat(parts), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_number(threads: int) -> None:
    case, before = Sequences([(200, 1), (9, 1), (300, 140)], heads=(6, 3)), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = case.attend()
        torch.set_num_threads(threads)
        assert torch.equal(case.attend(), alone)
    finally:
        torch.set_num_threads(before)


def test_what_there_is_no_kernel_for_is_gathered(gathered: list[int]) -> None:
    case = Sequences([(9, 1), (30, 9)], dtype=torch.float16)
    for blocks in (*case.cache.keys, *case.cache.values):
        blocks.nan_to_num_(0.0)
    torch.testing.assert_close(case.attend().float(), case.expected(), atol=1e-2, rtol=1e-2)
    assert len(gathered) == 4
    gathered.clear()


#: Key heads, query heads of each, and their dimensions of keys and values.
SHAPES = [(2, 1, 64, 64), (4, 2, 128, 128), (1, 7, 80, 72), (1, 4, 256, 256), (2, 2, 8, 8), (1, 24, 36, 20)]


@pytest.mark.parametrize("instructions", range(kernel.WIDEST + 1))
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_instruction_set_gives_what_the_formula_says(instructions, dtype, near, shape):
    for sizes in ([(100, 1), (1, 1), (480, 1)], [(37, 37), (65, 1), (300, 200)]):
        for softcap in (0.0, 5.0):
            call = RawCall(sizes, shape, dtype)
            out = call.attend(instructions, softcap)
            assert (out.float() - call.expected(softcap)).abs().max() < near


@pytest.mark.parametrize("instructions", range(kernel.WIDEST + 1))
def test_huge_numbers_and_a_nan_come_out_as_they_do_elsewhere(instructions: int) -> None:
    call = RawCall([(100, 1), (90, 80)], (1, 2, 64, 64), torch.float32, factor=1e4)
    torch.testing.assert_close(call.attend(instructions), call.expected(), atol=1e-1, rtol=1e-4)
    call = RawCall([(100, 1), (90, 80)], (1, 2, 64, 64), torch.float32)
    call.keys[:, call.slots[0][99]] = float("nan")
    out = call.attend(instructions)
    assert out[0].isnan().all() and not out[1:].isnan().any()


@pytest.mark.parametrize("instructions", range(kernel.WIDEST + 1))
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("sizes", [[(100, 1), (1, 1)], [(37, 37), (300, 200)]])
def test_a_bias_is_added_by_distance_or_by_position(instructions, dtype, near, sizes):
    call = RawCall(sizes, (2, 2, 64, 64), dtype)
    by_distance, by_position = torch.randn(4, 21), torch.randn(4, 300, 300)
    at = torch.arange(300)
    written = by_distance[:, (at[:, None] - at[None]).clamp(0, 20)]
    for bias, expected in ((by_distance, written), (by_position, by_position)):
        out = call.attend(instructions, bias=bias)
        assert (out.float() - call.expected(bias=expected)).abs().max() < near


@pytest.mark.parametrize("instructions", range(kernel.WIDEST + 1))
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("groups", [1, 7])
def test_keys_of_few_sequences_are_split_between_all_threads(instructions, dtype, near, groups):
    before = torch.get_num_threads()
    call = RawCall([(2003, 1), (300, 1)], (2, groups, 64, 32), dtype)
    alone = call.attend(instructions)
    torch.set_num_threads(21)
    try:
        split = call.attend(instructions)
    finally:
        torch.set_num_threads(before)
    assert not torch.equal(split, alone) or dtype == torch.bfloat16, "another order of additions"
    assert (split.float() - call.expected()).abs().max() < near


#: Decodes and chunks of so few and so many rows that every path of the kernel has some.
STEPS = [[(100, 1), (1, 1), (481, 1)], [(37, 37), (65, 3), (300, 200)]]
EVERY_SET = pytest.mark.parametrize("instructions", range(kernel.WIDEST + 1))
EVERY_TYPE = pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])


@EVERY_SET
@EVERY_TYPE
@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("sizes", STEPS)
def test_a_sink_is_one_more_term_whose_value_is_zero(instructions, dtype, near, groups, sizes):
    call = RawCall(sizes, (2, groups, 64, 32), dtype)
    sinks = torch.linspace(-4, 9, 2 * groups)
    sinks[0] = float("-inf")
    for softcap in (0.0, 5.0):
        out = call.attend(instructions, softcap, sinks=sinks)
        assert (out.float() - call.expected(softcap, sinks=sinks)).abs().max() < near
    assert call.attend(instructions, sinks=torch.full((2 * groups,), 1e4)).abs().max() < 1e-30


@EVERY_SET
@EVERY_TYPE
@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("block", [4, 16, 24, 32])
@pytest.mark.parametrize("window", [1, 5, 16, 33, 90])
def test_what_lies_outside_of_a_window_may_be_nan(instructions, dtype, near, groups, block, window):
    """Before the window, in the same block too; and what no token of the step attends to is not read."""
    sizes = [(100, 1), (1, 1), (481, 1), (70, 9)]
    call = RawCall(sizes, (2, groups, 64, 64), dtype, block=block)
    for slots, (length, count) in zip(call.slots, sizes, strict=True):
        for part in (call.keys, call.values):
            part[:, slots[: max(0, length - count + 1 - window)]] = float("nan")
    out = call.attend(instructions, window=window)
    assert (out.float() - call.expected(window=window)).abs().max() < near


@EVERY_SET
@EVERY_TYPE
@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"window": 1500}, {"sinks": torch.linspace(-4, 9, 16)}]
)
def test_one_long_sequence_among_short_ones_is_split(instructions, dtype, near, groups, options):
    """More threads than it has kv heads share its keys, though there is a task for every thread already."""
    sizes = [(30, 1), (3001, 1), *[(17, 1)] * 6]
    call = RawCall(sizes, (2, groups, 64, 64), dtype)
    if "sinks" in options:
        options = {"sinks": options["sinks"][: 2 * groups].contiguous()}
    before = torch.get_num_threads()
    alone = call.attend(instructions, **options)
    torch.set_num_threads(8)
    try:
        split = call.attend(instructions, **options)
    finally:
        torch.set_num_threads(before)
    assert not torch.equal(split[1], alone[1]) or dtype == torch.bfloat16, "another order of additions"
    assert torch.equal(split[[0, 2, 3]], alone[[0, 2, 3]]), "the short ones are as they were"
    assert (split.float() - call.expected(**options)).abs().max() < near


@EVERY_SET
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("length", [805, 811, 834])
@pytest.mark.parametrize("window", [1 << 30, 601, 777])
def test_every_key_counts_once_where_the_keys_are_cut(instructions, dtype, groups, length, window):
    """Values of one: the result is the weights' sum over their total, wherever a part ends within a tile."""
    call = RawCall([(length, 1)], (1, groups, 64, 64), dtype)
    call.values[:, call.slots[0]] = 1.0
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    try:
        out = call.attend(instructions, window=window)
    finally:
        torch.set_num_threads(before)
    assert (out.float() - 1).abs().max() < (5e-3 if dtype == torch.bfloat16 else 1e-6)


class RawCall:
    """A call of the kernel for sequences of (length, new tokens) in scattered blocks, with NaN elsewhere."""

    def __init__(
        self,
        sizes: Sequence[tuple[int, int]],
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        factor: float = 1.0,
        block: int = 16,
    ) -> None:
        self.block = block
        generator = torch.Generator().manual_seed(0)
        self.sizes, (heads, self.groups, dim, value_dim) = sizes, shape
        counts = [-(-length // block) for length, _ in sizes]
        self.tables = [*torch.randperm(sum(counts) + 3, generator=generator)[:-3].split(counts)]
        offsets = torch.arange(block)
        self.slots = [
            (table[:, None] * block + offsets).flatten()[:length]
            for table, (length, _) in zip(self.tables, sizes, strict=True)
        ]
        used = torch.cat(self.slots)
        self.keys, self.values = (
            torch.full((heads, block * (sum(counts) + 3), width), float("nan"), dtype=dtype)
            for width in (dim, value_dim)
        )
        for part in (self.keys, self.values):
            part[:, used] = (factor * torch.randn(heads, len(used), part.shape[2], generator=generator)).to(
                dtype
            )
        self.starts = [0, *np.cumsum([count for _, count in sizes]).tolist()]
        tokens = self.starts[-1]
        self.query = (
            torch.randn(tokens, heads * self.groups, dim, generator=generator).to(dtype).transpose(0, 1)
        )
        self.scale = dim**-0.5

    def attend(
        self,
        instructions: int,
        softcap: float = 0.0,
        bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        window: int = 1 << 30,
    ) -> torch.Tensor:
        out = self.query.new_full((self.starts[-1], self.query.shape[0], self.values.shape[2]), float("nan"))
        bounds = [
            (max(0, at + 1 - window), at + 1)
            for length, count in self.sizes
            for at in range(length - count, length)
        ]
        blocks = (
            part.unflatten(1, (-1, self.block)).permute(1, 2, 0, 3) for part in (self.keys, self.values)
        )
        kernel.attend(
            self.query, *blocks,
            kernel.Sequences.of(self.starts, self.tables), np.array(bounds, np.int32), out,
            scale=self.scale, softcap=softcap, bias=bias, sinks=sinks, instructions=instructions,
        )  # fmt: skip
        return out

    def expected(
        self,
        softcap: float = 0.0,
        bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        window: int = 1 << 30,
    ) -> torch.Tensor:
        parts = []
        for first, slots, (length, count) in zip(self.starts, self.slots, self.sizes, strict=False):
            key, value = (
                part[:, slots].float().repeat_interleave(self.groups, 0) for part in (self.keys, self.values)
            )
            scores = self.query[:, first : first + count].float() @ key.transpose(1, 2) * self.scale
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            if bias is not None:
                scores = scores + bias[:, length - count : length, :length]
            at, behind = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
            scores = scores.masked_fill((behind > at) | (behind <= at - window), float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None, None].expand(-1, count, 1)), -1)
            parts.append((scores.softmax(-1)[..., :length] @ value.nan_to_num()).transpose(0, 1))
        return torch.cat(parts)
