from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from triptych.models.base import KVShape, LayerRule, SpanRule
from triptych.pd_worker.attention.attention import (
    AttentionMetadata,
    PagedKVCache,
    PrefillSpan,
    paged_attention,
)

HEADS, DIM, BLOCK = 4, 8, 4


@dataclass
class Sequence:
    """Keys and values of one sequence so far, and how many of its tokens are computed in this step."""

    keys: torch.Tensor
    values: torch.Tensor
    count: int
    atomic: tuple[tuple[int, int], ...] = ()

    @property
    def length(self) -> int:
        return self.keys.shape[0]


def reaches(sequence: Sequence, rule: LayerRule, query: int, key: int) -> bool:
    both = any(a <= key < b and a <= query < b for a, b in sequence.atomic)
    near = rule.window is None or key > query - rule.window
    near = near and (rule.chunk is None or key // rule.chunk == query // rule.chunk)
    if rule.spans is SpanRule.WHOLE and both:
        return True
    return near and (key <= query or (both and rule.spans is SpanRule.CUT))


def make_sequences(
    generator: torch.Generator, lengths: list[tuple[int, int]], kv_heads: int
) -> list[Sequence]:
    def draw(length: int) -> torch.Tensor:
        return torch.randn(length, kv_heads, DIM, generator=generator)

    return [Sequence(draw(length), draw(length), count) for length, count in lengths]


def dense(
    query: torch.Tensor,
    sequence: Sequence,
    window: int | None,
    softcap: float | None,
    rule: LayerRule | None = None,
) -> torch.Tensor:
    """[count, HEADS, DIM]: the last `count` queries of one sequence, written out."""
    repeats = HEADS // sequence.keys.shape[1]
    keys = sequence.keys.repeat_interleave(repeats, 1)
    values = sequence.values.repeat_interleave(repeats, 1)
    out = torch.zeros(sequence.count, HEADS, DIM)
    for row in range(sequence.count):
        position = sequence.length - sequence.count + row
        seen = [
            k for k in range(sequence.length) if reaches(sequence, rule or LayerRule(window), position, k)
        ]
        scores = torch.einsum("hd,khd->hk", query[row], keys[seen]) * 0.3
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[seen])
    return out


class Paged:
    """The same sequences in scattered blocks of a cache whose other blocks hold rubbish."""

    def __init__(self, sequences: list[Sequence], kv_heads: int, seed: int) -> None:
        self.sequences = sequences
        self.cache = PagedKVCache(
            num_layers=2, num_blocks=64, block_size=BLOCK, num_kv_heads=kv_heads, head_dim=DIM,
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        for blocks in (*self.cache.keys, *self.cache.values):
            blocks.fill_(1e4)
        free = list(range(64))
        random.Random(seed).shuffle(free)
        self.tables = [[free.pop() for _ in range(-(-s.length // BLOCK))] for s in sequences]
        for sequence, table in zip(sequences, self.tables, strict=True):
            for i in range(sequence.length - sequence.count):
                self.cache.keys[1][table[i // BLOCK], i % BLOCK] = sequence.keys[i]
                self.cache.values[1][table[i // BLOCK], i % BLOCK] = sequence.values[i]

    def attend(self, query: torch.Tensor, rule: LayerRule | None = None, **options: Any) -> torch.Tensor:
        keys = torch.cat([s.keys[s.length - s.count :] for s in self.sequences])
        values = torch.cat([s.values[s.length - s.count :] for s in self.sequences])
        module = torch.nn.Module()
        module.layer_idx = 1  # type: ignore[assignment]
        out, _ = paged_attention(
            module,
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            None,
            scaling=0.3,
            attn_metadata=self._metadata(() if rule is None else (rule, rule)),
            **options,
        )
        return out[0]

    def _metadata(self, rules: tuple[LayerRule, ...] = ()) -> AttentionMetadata:
        decodes = [i for i, s in enumerate(self.sequences) if s.count == 1]
        assert decodes == list(range(len(decodes)))
        slots: list[int] = []
        prefills = []
        for sequence, table in zip(self.sequences, self.tables, strict=True):
            start = sequence.length - sequence.count
            if sequence.count > 1:
                first = len(slots)
                tensor = torch.tensor(table)
                prefills.append(PrefillSpan(first, first + sequence.count, start, tensor, sequence.atomic))
            slots += [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, sequence.length)]
        longest = max((len(self.tables[i]) for i in decodes), default=0)
        tables = [self.tables[i] + [0] * (longest - len(self.tables[i])) for i in decodes]
        return AttentionMetadata(
            cache=self.cache,
            slots=torch.tensor(slots),
            num_decodes=len(decodes),
            decode_tables=torch.tensor(tables, dtype=torch.int64),
            decode_lengths=torch.tensor([self.sequences[i].length for i in decodes], dtype=torch.int64),
            prefills=prefills,
            layer_rules=rules,
        )


def check(
    sequences: list[Sequence], kv_heads: int, seed: int, rule: LayerRule | None = None, **options: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(sum(s.count for s in sequences), HEADS, DIM, generator=generator)
    window, softcap = options.get("sliding_window"), options.get("softcap")
    parts = query.split([s.count for s in sequences])
    expected = [dense(part, s, window, softcap, rule) for part, s in zip(parts, sequences, strict=True)]
    actual = Paged(sequences, kv_heads, seed).attend(query, rule, **options)
    torch.testing.assert_close(actual, torch.cat(expected), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 3}, {"softcap": 2.0}, {"sliding_window": 5, "softcap": 1.0}]
)
def test_a_ragged_batch_equals_dense_attention(kv_heads: int, options: dict[str, Any]) -> None:
    rng = random.Random(kv_heads)
    for seed in range(6):
        decodes = [(rng.randint(1, 20), 1) for _ in range(rng.randint(0, 4))]
        chunks = []
        for _ in range(rng.randint(0 if decodes else 1, 3)):
            length = rng.randint(2, 20)
            chunks.append((length, rng.randint(2, length)))
        sequences = make_sequences(torch.Generator().manual_seed(seed), decodes + chunks, kv_heads)
        check(sequences, kv_heads, seed, **options)


@pytest.mark.parametrize("spans", SpanRule)
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (3, None), (None, 4), (5, 6)])
def test_a_layers_rule_decides_what_it_reaches(
    spans: SpanRule, window: int | None, chunk: int | None
) -> None:
    rule = LayerRule(window, chunk, spans)
    lengths = [(9, 1), (16, 1), (14, 14), (18, 12)]
    sequences = make_sequences(torch.Generator().manual_seed(5), lengths, 2)
    for sequence in sequences[2:]:
        sequence.atomic = ((7, 13),)
    # The keyword of the attention function does not count where there are rules.
    check(sequences, 2, 5, rule, sliding_window=2)


@pytest.mark.parametrize("backend", ["sdpa", "blockwise"])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_values_of_another_width_than_the_keys(kv_heads: int, backend: str) -> None:
    generator = torch.Generator().manual_seed(6)
    sequence = make_sequences(generator, [(10, 6)], kv_heads)[0]
    cut = Sequence(sequence.keys, sequence.values[..., :5], 6)
    paged = Paged([sequence], kv_heads, 6)
    paged.cache = PagedKVCache(
        num_layers=2, num_blocks=64, block_size=BLOCK, num_kv_heads=0, head_dim=0, dtype=torch.float32,
        device=torch.device("cpu"), kv_shapes=(KVShape(kv_heads, DIM, 5),) * 2,
    )  # fmt: skip
    for i in range(4):
        paged.cache.keys[1][paged.tables[0][i // BLOCK], i % BLOCK] = sequence.keys[i]
        paged.cache.values[1][paged.tables[0][i // BLOCK], i % BLOCK] = cut.values[i]
    paged.sequences = [cut]
    query = torch.randn(6, HEADS, DIM, generator=generator)
    wide = dense(query, Sequence(sequence.keys, sequence.values, 6), None, None)
    assert paged.cache.token_bytes == 2 * kv_heads * (DIM + 5) * 4
    metadata = paged._metadata()
    metadata.backend = backend
    paged._metadata = lambda _: metadata  # type: ignore[method-assign]
    torch.testing.assert_close(paged.attend(query), wide[..., :5], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("length", "count"), [(12, 12), (12, 9)])
def test_an_atomic_span_attends_both_ways(length: int, count: int) -> None:
    sequences = make_sequences(torch.Generator().manual_seed(2), [(length, count)], 2)
    sequences[0].atomic = ((3, 9),)
    check(sequences, 2, 2)


@pytest.mark.parametrize("name", ["s_aux", "position_bias", "score_mod"])
def test_what_it_would_have_to_ignore_is_an_error(name: str) -> None:
    sequences = make_sequences(torch.Generator().manual_seed(3), [(4, 4)], 2)
    with pytest.raises(NotImplementedError, match=name):
        Paged(sequences, 2, 3).attend(torch.randn(4, HEADS, DIM), **{name: object()})


def test_attention_that_is_not_causal_is_an_error() -> None:
    sequences = make_sequences(torch.Generator().manual_seed(3), [(4, 4)], 2)
    with pytest.raises(NotImplementedError, match="causal"):
        Paged(sequences, 2, 3).attend(torch.randn(4, HEADS, DIM), is_causal=False)
