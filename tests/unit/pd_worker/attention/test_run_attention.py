"""Attention run by run equals attention over all keys, wherever the blocks of a sequence are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.engine.reference_attention import written_out
from triptych.pd_worker.attention import attention, run_attention
from triptych.pd_worker.attention.attention import AttentionMetadata, PagedKVCache, PrefillSpan
from triptych.pd_worker.attention.metadata import runs_of
from triptych.pd_worker.attention.run_attention import uses_runs

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
                context = runs_of(table, start, size)
                prefills.append(PrefillSpan(at, at + count, start, torch.tensor(table), (), context))
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
            decode_runs=[runs_of(t, length, size) for t, length in zip(decodes, lengths, strict=True)],
        )

    def expected(self, window: int | None = None) -> torch.Tensor:
        outputs = []
        for (length, count), query, own in zip(self.sizes, self.queries, self.own, strict=True):
            at, behind = torch.arange(length - count, length)[:, None], torch.arange(length)[None]
            allowed = (behind <= at) & (behind > at - (window or length))
            key, value = (part.float() for part in own)
            outputs.append(written_out(query.float(), key, value, scale=SCALE, allowed=allowed))
        return torch.cat(outputs)


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(*_: object) -> torch.Tensor:
        raise AssertionError("keys are gathered")

    monkeypatch.setattr(attention, "_gather", gathered)


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("stretch", [1, 3, 60], ids=["scattered", "short runs", "one run"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_decodes_and_chunks_equal_attention_over_all_keys(stretch: int, heads: tuple[int, int]) -> None:
    draw = random.Random(stretch)
    for seed in range(5):
        decodes = [(draw.choice([1, 2, 4, 5, 31, 32, 33]), 1) for _ in range(draw.randrange(5))]
        chunks = [(length, draw.randrange(2, length + 1)) for length in (2, 4, 9, 40)]
        case = Sequences([*decodes, *chunks], heads=heads, stretch=stretch, seed=seed)
        torch.testing.assert_close(case.attend(), case.expected(), atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("no_copies")
def test_a_prefix_that_sequences_share_is_a_run_of_its_own() -> None:
    case = Sequences([(30, 1), (33, 1), (25, 1), (60, 20)], shared=6, stretch=60)
    assert [len(runs) for runs in case.metadata().decode_runs] == [2, 2, 2]
    torch.testing.assert_close(case.attend(), case.expected(), atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("window", [1, 3, 4, 5, 29, 100])
def test_a_window_sees_the_last_tokens_of_the_runs(window: int) -> None:
    case = Sequences([(1, 1), (7, 1), (30, 1), (9, 1), (64, 1)])
    torch.testing.assert_close(
        case.attend(sliding_window=window), case.expected(window), atol=2e-5, rtol=1e-4
    )


def test_merged_runs_in_bfloat16_are_as_near_as_one_call() -> None:
    sizes = [(200, 1), (180, 1), (300, 40)]
    errors = []
    for stretch in (90, 4):
        case = Sequences(sizes, stretch=stretch, dtype=torch.bfloat16)
        errors.append((case.attend().float() - case.expected()).abs().max())
    assert errors[1] <= 2 * errors[0]


@pytest.mark.parametrize(
    ("options", "copies"),
    [({"softcap": 50.0}, 4), ({"sliding_window": 7}, 2), ({"sliding_window": 7, "softcap": 50.0}, 4)],
)
def test_what_runs_are_not_for_is_gathered(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], copies: int
) -> None:
    """Capped scores, and a window in a chunk, need what no run gives: all scores, or a mask."""
    gathered = []
    inner = attention._gather
    monkeypatch.setattr(attention, "_gather", lambda *args: gathered.append(1) or inner(*args))
    case = Sequences([(9, 1), (30, 9)])
    for blocks in (*case.cache.keys, *case.cache.values):
        blocks.nan_to_num_(0.0)
    out = case.attend(**options)
    assert len(gathered) == copies
    torch.testing.assert_close(out, case.expected(options.get("sliding_window")), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("atomic", [(3, 15), (25, 28), (29, 35)])
def test_tokens_that_attend_both_ways_are_masked_where_they_are_in_the_chunk(atomic: tuple[int, int]) -> None:
    case = Sequences([(30, 20)], stretch=60)
    metadata = case.metadata()
    (span,) = metadata.prefills
    metadata.prefills = [replace(span, atomic=(atomic,))]
    at, behind = torch.arange(10, 30)[:, None], torch.arange(30)[None]
    both = (at >= atomic[0]) & (at < atomic[1]) & (behind >= atomic[0]) & (behind < atomic[1])
    (query,), (own,) = case.queries, case.own
    expected = written_out(query, own[0], own[1], scale=SCALE, allowed=(behind <= at) | both)
    torch.testing.assert_close(case.attend(metadata), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("no_copies")
def test_a_span_that_lies_before_the_chunk_needs_no_mask() -> None:
    case = Sequences([(30, 9)], stretch=60)
    metadata = case.metadata()
    (span,) = metadata.prefills
    metadata.prefills = [replace(span, atomic=((3, 21), (30, 40)))]
    torch.testing.assert_close(case.attend(metadata), case.expected(), atol=2e-5, rtol=1e-4)


def test_scattered_context_is_gathered_without_the_chunk_and_without_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Sequences([(50, 17)], stretch=1)
    metadata = case.metadata()
    (span,) = metadata.prefills
    metadata.prefills = [replace(span, context=())]
    monkeypatch.setattr(AttentionMetadata, "prefill_mask", None)
    torch.testing.assert_close(case.attend(metadata), case.expected(), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("device", "backend", "bias", "used"),
    [
        ("cpu", "sdpa", None, True),
        ("cpu", "blockwise", None, False),
        ("cpu", "sdpa", object(), False),
        ("cuda", "sdpa", None, False),
    ],
)
def test_runs_are_read_where_the_kernel_gives_what_merging_needs(
    device: str, backend: str, bias: object, used: bool
) -> None:
    decoder: Any = SimpleNamespace(device=torch.device(device), bias=bias)
    assert uses_runs(backend, decoder) is used


def test_a_release_of_torch_without_the_kernel_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_attention, "_KERNEL", None)
    decoder: Any = SimpleNamespace(device=torch.device("cpu"), bias=None)
    assert not uses_runs("sdpa", decoder)
