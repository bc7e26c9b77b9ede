"""Attention metadata of one step: block tables, lengths, masks and biases, the same for all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from triptych.base.config import MIB
from triptych.models.base import AttentionBias
from triptych.models.geometry import LayerRule, SpanRule
from triptych.models.recurrent import RecurrentStates
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache

if TYPE_CHECKING:
    from triptych.kernels.cpu_attention import Sequences
    from triptych.kernels.paged_attention import PagedQueries

#: Limit of the bytes that one layer gathers at a time; a single longer sequence is gathered alone.
GATHER_LIMIT = 64 * MIB


@dataclass(frozen=True, slots=True)
class GatherGroup:
    """Decodes [first, last) of the batch, gathered with `blocks` blocks each, padded to the longest.

    With one long sequence among many short ones every copy would be long: groups bound a layer's memory.
    """

    first: int
    last: int
    blocks: int


def gathered_blocks(cache: PagedKVCache, limit: int) -> int:
    """Blocks whose keys and values one layer gathers at a time, by a limit in bytes."""
    return max(1, limit // (cache.layer_bytes * cache.block_size))


def plan_gathers(blocks: Sequence[int], most: int) -> list[GatherGroup]:
    """Groups of decodes with these numbers of blocks, in order: `most` blocks each, or one decode."""
    groups: list[GatherGroup] = []
    first, longest = 0, 0
    for index, count in enumerate(blocks):
        now = max(longest, count)
        if index > first and now * (index - first + 1) > most:
            groups.append(GatherGroup(first, index, longest))
            first, now = index, count
        longest = now
    if blocks:
        groups.append(GatherGroup(first, len(blocks), longest))
    return groups


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One sequence's prefill chunk: batch tokens [first, last), positions [start, start + last - first).

    `table` [blocks] covers all its positions so far. `atomic` spans, in positions, attend both ways.
    """

    first: int
    last: int
    start: int
    table: torch.Tensor
    atomic: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.last - self.first


@dataclass(frozen=True, slots=True)
class CrossSpan:
    """One encoder output: its first `rows` rows are in the blocks of `table` [blocks].

    `first` is the first block where they are contiguous, so that nothing has to be gathered. `tokens` [n]
    are the batch indices of the decodes that attend to it.
    """

    table: torch.Tensor
    rows: int
    first: int | None = None
    tokens: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class CrossTables:
    """Block tables of the batch's encoder outputs for cross-attention, all of them written.

    As in AttentionMetadata: `decode_tables` [D, blocks] and `decode_lengths` [D] in rows, for all decodes at
    once or in `decode_groups`; where outputs are long or shared, `decodes` has one span per output instead.
    `prefills` belong to the prefill spans, in order.
    """

    decode_tables: torch.Tensor
    decode_lengths: torch.Tensor
    prefills: Sequence[CrossSpan]
    decode_padded: bool = True
    decodes: Sequence[CrossSpan] = ()
    decode_groups: Sequence[GatherGroup] = ()

    @property
    def groups(self) -> Sequence[GatherGroup]:
        """Groups of decodes that are gathered together; one group of all where none were planned."""
        return self.decode_groups or _all_of(self.decode_tables)


@dataclass(slots=True)
class AttentionMetadata:
    """One step's batch, the same for every layer.

    `slots` [T] are the cache slots of the tokens' keys and values. The first `num_decodes` batch tokens are
    one sequence each: their blocks are `decode_tables` [D, blocks], padded with any block, their lengths, the
    new token included, `decode_lengths` [D].
    """

    cache: PagedKVCache
    slots: torch.Tensor
    num_decodes: int
    decode_tables: torch.Tensor
    decode_lengths: torch.Tensor
    prefills: Sequence[PrefillSpan]
    #: Lengths differ or do not fill their blocks, so that gathered keys need a mask.
    decode_padded: bool = True
    #: Groups of decodes that are gathered together; empty: one group of all.
    decode_groups: Sequence[GatherGroup] = ()
    #: Set for encoder-decoder models.
    cross: CrossTables | None = None
    #: Bias that the model adds to the scores of self-attention.
    bias: AttentionBias | None = None
    #: What each layer reaches; empty: as its attention function is called.
    layer_rules: Sequence[LayerRule] = ()
    backend: str = "sdpa"
    #: Set for models with recurrent layers: the batch is then one sequence, or has one token of each.
    states: RecurrentStates | None = None
    _masks: dict[tuple[int, LayerRule | None, torch.dtype | None], torch.Tensor | None] = field(
        default_factory=dict
    )
    #: What the Triton kernel takes, see `queries_of`.
    queries: dict[tuple[bool, bool], Sequence[PagedQueries]] = field(default_factory=dict)
    #: What the CPU's kernel takes: the step's sequences, and each rule's bounds of the keys of every token.
    sequences: Sequences | None = None
    bounds: dict[LayerRule, np.ndarray] = field(default_factory=dict)
    #: Whole biases by the modules that share them.
    biases: dict[tuple[object, int], torch.Tensor] = field(default_factory=dict)

    @property
    def groups(self) -> Sequence[GatherGroup]:
        """Groups of decodes that are gathered together; one group of all where none were planned."""
        return self.decode_groups or _all_of(self.decode_tables)

    def decode_mask(self, rule: LayerRule, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """[D, 1, 1, blocks * block_size], True where a key is attended to; None when all are.

        With a `dtype`, here as in the other masks, what is added to the scores: 0 there, -inf elsewhere. Each
        is made once in a step, for all layers.
        """
        return self._mask((-1, rule), lambda: self._decode_mask(rule), dtype)

    def _mask(
        self,
        key: tuple[int, LayerRule | None],
        make: Callable[[], torch.Tensor | None],
        dtype: torch.dtype | None,
    ) -> torch.Tensor | None:
        if (*key, dtype) not in self._masks:
            mask = make() if dtype is None else self._mask(key, make, None)
            self._masks[*key, dtype] = mask if mask is None or dtype is None else added_mask(mask, dtype)
        return self._masks[*key, dtype]

    def _decode_mask(self, rule: LayerRule) -> torch.Tensor | None:
        if rule.window is None and rule.chunk is None and not self.decode_padded:
            return None
        lengths = self.decode_lengths[:, None]
        position = self._key_positions(self.decode_tables)
        mask = position < lengths
        return (mask & _near(lengths - 1, position, rule))[:, None, None]

    def _key_positions(self, tables: torch.Tensor) -> torch.Tensor:
        """[1, keys] of gathered tables [D, blocks]."""
        return torch.arange(tables.shape[1] * self.cache.block_size, device=tables.device)[None]

    def cross_mask(self, dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """[D, 1, 1, blocks * block_size] of the decodes' cross tables; None when all rows count."""
        return self._mask((-2, None), self._cross_mask, dtype)

    def _cross_mask(self) -> torch.Tensor | None:
        assert self.cross is not None
        if not self.cross.decode_padded:
            return None
        position = self._key_positions(self.cross.decode_tables)
        return (position < self.cross.decode_lengths[:, None])[:, None, None]

    def bias_positions(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions of queries [B, q] and keys [B, k] of the decodes (-1) or of prefill `index`."""
        device = self.slots.device
        if index < 0:
            keys = self._key_positions(self.decode_tables).expand(self.num_decodes, -1)
            return self.decode_lengths[:, None] - 1, keys
        span = self.prefills[index]
        return (
            torch.arange(span.start, span.end, device=device)[None],
            torch.arange(span.end, device=device)[None],
        )

    def prefill_mask(
        self, index: int, rule: LayerRule, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """[queries, keys] of prefill `index`; None when plain causal from position 0."""
        return self._mask((index, rule), lambda: self._prefill_mask(self.prefills[index], rule), dtype)

    def _prefill_mask(self, span: PrefillSpan, rule: LayerRule) -> torch.Tensor | None:
        atomic = span.atomic if rule.spans is not SpanRule.NONE else ()
        limits = (limit for limit in (rule.window, rule.chunk) if limit is not None)
        if span.start == 0 and not atomic and all(limit >= span.end for limit in limits):
            return None
        query = torch.arange(span.start, span.end, device=self.slots.device)[:, None]
        key = torch.arange(span.end, device=self.slots.device)[None]
        mask, near = key <= query, _near(query, key, rule)
        for start, end in atomic:
            both = (query >= start) & (query < end) & (key >= start) & (key < end)
            mask |= both
            if rule.spans is SpanRule.WHOLE:
                near |= both
        return mask & near


def added_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where `mask` is True, -inf elsewhere: of a bool, torch's attention makes it again in every layer.

    Rows begin at multiples of 16 elements: the kernels of CUDA copy others.
    """
    keys = mask.shape[-1]
    wide = torch.zeros(*mask.shape[:-1], -(-keys // 16) * 16, dtype=dtype, device=mask.device)
    return wide[..., :keys].masked_fill_(~mask, float("-inf"))


def _near(query: torch.Tensor, key: torch.Tensor, rule: LayerRule) -> torch.Tensor:
    """Whether the rule's window and chunk let a query's position reach a key's."""
    near = key > query - rule.window if rule.window is not None else torch.ones_like(key > query)
    if rule.chunk is not None:
        near &= key // rule.chunk == query // rule.chunk
    return near


def _all_of(tables: torch.Tensor) -> tuple[GatherGroup, ...]:
    return (GatherGroup(0, tables.shape[0], tables.shape[1]),)
