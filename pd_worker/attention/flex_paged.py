"""A step's batch for FlexAttention: padded sizes, key ranges and block masks, made once per step."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from triptych.pd_worker.attention import key_ranges
from triptych.pd_worker.attention.flex_kernel import MIN_BATCH, FlexCall, attend
from triptych.pd_worker.attention.key_ranges import BLOCK, KeyRanges, whole_blocks
from triptych.pd_worker.attention.metadata import AttentionMetadata, CrossSpan, PrefillSpan


@dataclass(frozen=True, slots=True)
class Plan:
    """Tables, ranges and block mask of one call, the same in every layer.

    `tables` [B, blocks] are those of the cache, padded so that their tokens are a multiple of BLOCK.
    """

    tables: torch.Tensor
    ranges: KeyRanges
    blocks: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class FlexBatch:
    """One layer's attention: `keys` and `values` are the cache's, `query` is [heads, T, dim]."""

    module: torch.nn.Module
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    meta: AttentionMetadata
    scale: float
    softcap: float | None
    window: int | None

    def self_attention(self) -> torch.Tensor:
        """[T, heads, dim]: every token over its own sequence, whose keys have been written."""
        meta, window, out = self.meta, self.window, self._empty()
        for group in meta.groups if meta.num_decodes else ():
            rows = slice(group.first, group.last)
            lengths, tables = meta.decode_lengths[rows], meta.decode_tables[rows, : group.blocks]
            plan = self._plan(
                ("decodes", group.first, window),
                functools.partial(self._decode_plan, tables, key_ranges.of_decodes(lengths, window)),
            )
            out[rows] = self._decodes(plan, rows, biased=True)
        for index, span in enumerate(meta.prefills):
            plan = self._plan((index, window), functools.partial(self._self_plan, span))
            part = self.query[:, span.first : span.last]
            out[span.first : span.last] = self._chunk(plan, part, biased=True)
        return out

    def cross_attention(self) -> torch.Tensor:
        """[T, heads, dim]: every token over the rows of its sequence's encoder output."""
        meta, cross, out = self.meta, self.meta.cross, self._empty()
        assert cross is not None
        # Not by encoder output, even where it is shared: each call would be padded to a block of queries.
        for group in cross.groups if meta.num_decodes else ():
            rows = slice(group.first, group.last)
            lengths, tables = cross.decode_lengths[rows], cross.decode_tables[rows, : group.blocks]
            plan = self._plan(
                ("cross decodes", group.first),
                functools.partial(self._decode_plan, tables, key_ranges.of_rows(lengths, 1)),
            )
            out[rows] = self._decodes(plan, rows, biased=False)
        for index, (chunk, span) in enumerate(zip(meta.prefills, cross.prefills, strict=True)):
            plan = self._plan(("cross", index), functools.partial(self._cross_plan, span, chunk))
            part = self.query[:, chunk.first : chunk.last]
            out[chunk.first : chunk.last] = self._chunk(plan, part, biased=False)
        return out

    def _empty(self) -> torch.Tensor:
        heads, tokens, dim = self.query.shape
        return torch.empty(tokens, heads, dim, dtype=self.query.dtype, device=self.query.device)

    def _self_plan(self, span: PrefillSpan) -> Plan:
        ranges = key_ranges.of_chunk(span.start, span.end, self.window, span.atomic, self.query.device)
        return self._chunk_plan(span.table, ranges)

    def _cross_plan(self, span: CrossSpan, chunk: PrefillSpan) -> Plan:
        rows = torch.full((1,), span.rows, dtype=torch.int32, device=self.query.device)
        return self._chunk_plan(span.table, key_ranges.of_rows(rows, chunk.last - chunk.first))

    def _plan(self, key: object, make: Callable[[], Plan]) -> Plan:
        """The plan of an earlier layer with this key, or a new one."""
        plans = self.meta.plans
        if key not in plans:
            plans[key] = make()
        plan = plans[key]
        assert isinstance(plan, Plan)
        return plan

    def _decode_plan(self, tables: torch.Tensor, ranges: KeyRanges) -> Plan:
        """A plan of one query per row of `tables` [D, blocks]; its heads become rows."""
        batch = max(MIN_BATCH, len(tables))
        more = tables[:1].expand(batch - len(tables), -1)
        rows = ranges.repeated(self._groups).padded(batch, self._groups)
        return self._made(torch.cat([tables, more]), rows)

    def _chunk_plan(self, table: torch.Tensor, ranges: KeyRanges) -> Plan:
        """A plan of the queries of one sequence with this `table` [blocks], padded to a multiple of BLOCK."""
        return self._made(table[None], ranges.padded(1, whole_blocks(ranges.first.shape[1])))

    def _made(self, tables: torch.Tensor, ranges: KeyRanges) -> Plan:
        size, count = self.meta.cache.block_size, tables.shape[1]
        at_once = math.lcm(size, BLOCK) // size
        blocks = -(-whole_blocks(count * size) // (at_once * size)) * at_once
        # Padded with the row's own first block: masked keys are read too.
        more = tables[:, :1].expand(-1, blocks - count)
        return Plan(torch.cat([tables, more], 1), ranges, ranges.blocks(blocks * size))

    @property
    def _groups(self) -> int:
        """Query heads per kv head."""
        return self.query.shape[0] // self.keys.shape[2]

    def _decodes(self, plan: Plan, rows: slice, *, biased: bool) -> torch.Tensor:
        """[n, heads, dim] of these n batch tokens."""
        heads, _, dim = self.query.shape
        count, batch = rows.stop - rows.start, len(plan.tables)
        query = self.query.new_zeros(batch, heads, dim)
        query[:count] = self.query[:, rows].transpose(0, 1)
        packed = query.view(batch, -1, self._groups, dim)
        return self._attend(plan, packed, biased=biased, heads_in_rows=True).reshape(batch, heads, dim)[
            :count
        ]

    def _chunk(self, plan: Plan, query: torch.Tensor, *, biased: bool) -> torch.Tensor:
        """[n, heads, dim] of one sequence's queries [heads, n, dim]."""
        heads, count, dim = query.shape
        padded = query.new_zeros(1, heads, plan.ranges.first.shape[1], dim)
        padded[0, :, :count] = query
        return self._attend(plan, padded, biased=biased, heads_in_rows=False)[0, :, :count].transpose(0, 1)

    def _attend(self, plan: Plan, query: torch.Tensor, *, biased: bool, heads_in_rows: bool) -> torch.Tensor:
        bias = self.meta.bias if biased else None
        return attend(
            FlexCall(
                query,
                _gather(self.keys, plan.tables),
                _gather(self.values, plan.tables),
                plan.ranges,
                plan.blocks,
                self.scale,
                self.softcap,
                None if bias is None else bias.pointwise(self.module),
                heads_in_rows,
            )
        )


def _gather(blocks: torch.Tensor, tables: torch.Tensor) -> torch.Tensor:
    """[B, kv_heads, tokens, dim] of the blocks in `tables` [B, n]."""
    gathered = blocks.index_select(0, tables.flatten())
    return gathered.view(len(tables), -1, *blocks.shape[2:]).transpose(1, 2)
