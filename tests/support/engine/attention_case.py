"""A step of attention with drawn contents, through `paged_attention`, and what the formula says of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from support.engine.reference_attention import written_out
from triptych.models.geometry import KVShape, LayerRule, SpanRule
from triptych.pd_worker.attention.attention import paged_attention
from triptych.pd_worker.attention.metadata import (
    AttentionMetadata,
    CrossSpan,
    CrossTables,
    PagedKVCache,
    PrefillSpan,
)

HEADS, DIM, BLOCK, SCALE, LONGEST = 4, 8, 4, 0.3, 700


@dataclass(frozen=True)
class Chunk:
    """`count` new tokens of a sequence of `length`, over `rows` of an encoder output."""

    length: int
    count: int
    rows: int = 1
    #: Spans whose tokens attend both ways.
    atomic: tuple[tuple[int, int], ...] = ()


#: Decodes first, of unequal lengths, then chunks from the start and from the middle.
BATCH = (Chunk(9, 1, 5), Chunk(16, 1, 23), Chunk(7, 7, 1), Chunk(21, 6, 40))
FULL_BLOCKS = (Chunk(8, 1, 12), Chunk(8, 1, 12))
LONG = (Chunk(600, 1, 600), Chunk(555, 40, 515))


def bias_by_position(seed: int = 1) -> torch.Tensor:
    """A number for every head and pair of positions."""
    return torch.randn(HEADS, LONGEST, LONGEST, generator=torch.Generator().manual_seed(seed))


def bias_by_distance() -> torch.Tensor:
    """A number for every head and distance, of which all from 20 on share one."""
    return torch.randn(HEADS, 21, generator=torch.Generator().manual_seed(4))


#: Of heads that a sink changes much, hardly, not at all, and whose keys it leaves nothing.
SINKS = torch.tensor([1.5, -3.0, -1e30, 60.0])


class Case:
    """Chunks with drawn contents in scattered blocks of a cache whose other blocks hold rubbish."""

    def __init__(
        self, chunks: tuple[Chunk, ...], kv_heads: int = HEADS, seed: int = 0, value_dim: int = DIM
    ) -> None:
        self.chunks = chunks
        generator = torch.Generator().manual_seed(seed)

        def draw(count: int, heads: int, dim: int = DIM) -> torch.Tensor:
            return torch.randn(count, heads, dim, generator=generator)

        def pair(count: int) -> tuple[torch.Tensor, torch.Tensor]:
            return draw(count, kv_heads), draw(count, kv_heads, value_dim)

        self.queries = [draw(chunk.count, HEADS) for chunk in chunks]
        self.own = [pair(chunk.length) for chunk in chunks]
        self.encoder = [pair(chunk.rows) for chunk in chunks]
        self.cache = PagedKVCache(
            num_layers=2, num_blocks=1000, block_size=BLOCK, num_kv_heads=kv_heads, head_dim=DIM,
            dtype=torch.float32, device=torch.device("cpu"),
            kv_shapes=() if value_dim == DIM else (KVShape(kv_heads, DIM, value_dim),) * 2,
        )  # fmt: skip
        for blocks in (*self.cache.keys, *self.cache.values):
            blocks.fill_(1e4)
        self._free = list(range(1000))
        random.Random(seed).shuffle(self._free)
        self.own_tables = [
            self._fill(k, v, c.length - c.count) for (k, v), c in zip(self.own, chunks, strict=True)
        ]
        self.cross_tables = [self._fill(k, v, len(k)) for k, v in self.encoder]

    def _fill(self, key: torch.Tensor, value: torch.Tensor, written: int) -> list[int]:
        """A table for all of these, of which the first `written` are in their blocks."""
        table = [self._free.pop() for _ in range(-(-len(key) // BLOCK))]
        slots = self.cache.slots(table, written)
        for layer in range(2):
            self.cache.write(layer, slots, key[:written], value[:written])
        return table

    def attend(
        self,
        backend: str,
        *,
        cross: bool = False,
        layer: int = 0,
        bias: torch.Tensor | None = None,
        rule: LayerRule | None = None,
        **options: Any,
    ) -> torch.Tensor:
        module = torch.nn.Module()
        module.layer_idx = layer  # type: ignore[assignment]
        module.is_cross = cross  # type: ignore[assignment]
        new = [(k[-c.count :], v[-c.count :]) for (k, v), c in zip(self.own, self.chunks, strict=True)]
        key, value = (torch.cat(parts).transpose(0, 1)[None] for parts in zip(*new, strict=True))
        query = torch.cat(self.queries).transpose(0, 1)[None]
        out, _ = paged_attention(
            module,
            query,
            None if cross else key,  # type: ignore[arg-type]
            None if cross else value,  # type: ignore[arg-type]
            None,
            scaling=SCALE,
            attn_metadata=self._metadata(backend, bias, rule),
            **options,
        )
        return out[0]

    def _metadata(
        self, backend: str, bias: torch.Tensor | None, rule: LayerRule | None = None
    ) -> AttentionMetadata:
        decodes = [i for i, chunk in enumerate(self.chunks) if chunk.count == 1]
        slots: list[int] = []
        prefills, rows = [], []
        for chunk, own, cross in zip(self.chunks, self.own_tables, self.cross_tables, strict=True):
            start = chunk.length - chunk.count
            if chunk.count > 1:
                end = len(slots) + chunk.count
                prefills.append(PrefillSpan(len(slots), end, start, torch.tensor(own), chunk.atomic))
                rows.append(CrossSpan(torch.tensor(cross), chunk.rows))
            slots += [own[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, chunk.length)]
        lengths = [self.chunks[i].length for i in decodes]
        encoded = [self.chunks[i].rows for i in decodes]
        own_tables = padded([self.own_tables[i] for i in decodes])
        cross_tables = padded([self.cross_tables[i] for i in decodes])
        return AttentionMetadata(
            cache=self.cache,
            slots=torch.tensor(slots),
            num_decodes=len(decodes),
            decode_tables=own_tables,
            decode_lengths=torch.tensor(lengths),
            prefills=prefills,
            decode_blocks=[len(self.own_tables[i]) for i in decodes],
            cross=CrossTables(
                cross_tables, torch.tensor(encoded), rows, [len(self.cross_tables[i]) for i in decodes]
            ),
            bias=bias,
            backend=backend,
            layer_rules=() if rule is None else (rule, rule),
        )

    def expected_self(
        self,
        bias: torch.Tensor | None = None,
        window: int | None = None,
        softcap: float | None = None,
        rule: LayerRule | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        outputs, rule = [], rule or LayerRule(window)
        for chunk, query, (key, value) in zip(self.chunks, self.queries, self.own, strict=True):
            at = torch.arange(chunk.length - chunk.count, chunk.length)[:, None]
            behind = torch.arange(chunk.length)[None]
            both = torch.zeros(chunk.count, chunk.length, dtype=torch.bool)
            for a, b in chunk.atomic:
                both |= (a <= at) & (at < b) & (a <= behind) & (behind < b)
            near = behind > at - (rule.window or chunk.length)
            if rule.chunk is not None:
                near &= at // rule.chunk == behind // rule.chunk
            cut, whole = (both & (rule.spans is spans) for spans in (SpanRule.CUT, SpanRule.WHOLE))
            allowed = near & ((behind <= at) | cut) | whole
            added = None
            if bias is not None:
                by_distance = bias.dim() == 2
                added = bias[:, (at - behind).clamp(0, 20)] if by_distance else bias[:, at, behind]
            outputs.append(
                written_out(
                    query, key, value, scale=SCALE, allowed=allowed, bias=added, softcap=softcap, sinks=sinks
                )
            )
        return torch.cat(outputs)

    def expected_cross(self, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """One dense product over all rows of all requests: each sees the rectangle of its own."""
        key, value = (torch.cat(parts) for parts in zip(*self.encoder, strict=True))
        counts, rows = [c.count for c in self.chunks], [c.rows for c in self.chunks]
        allowed = torch.block_diag(*(torch.ones(c, r) for c, r in zip(counts, rows, strict=True))).bool()
        return written_out(torch.cat(self.queries), key, value, scale=SCALE, allowed=allowed, sinks=sinks)


def padded(tables: list[list[int]]) -> torch.Tensor:
    longest = max(map(len, tables), default=0)
    rows = [table + [0] * (longest - len(table)) for table in tables]
    return torch.tensor(rows, dtype=torch.int64).view(len(tables), longest)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
