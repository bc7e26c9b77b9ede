"""Attention metadata of one step: block tables, lengths, masks and biases, the same for all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from triptych.models.geometry import LayerRule, SpanRule
from triptych.models.recurrent import RecurrentStates
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache

if TYPE_CHECKING:
    from triptych.kernels.cpu_attention import Sequences
    from triptych.kernels.paged_attention import PagedQueries


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
    """One encoder output: its first `rows` rows are in the blocks of `table` [blocks]."""

    table: torch.Tensor
    rows: int


@dataclass(frozen=True, slots=True)
class CrossTables:
    """Block tables of the batch's encoder outputs for cross-attention, all of them written.

    As in AttentionMetadata: `decode_tables` [D, blocks], `decode_lengths` [D] in rows, and `decode_blocks`.
    `prefills` belong to the prefill spans, in order.
    """

    decode_tables: torch.Tensor
    decode_lengths: torch.Tensor
    prefills: Sequence[CrossSpan]
    decode_blocks: Sequence[int] = ()


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
    #: The blocks of each decode, where the host knows them: a graph takes them from `decode_lengths`.
    decode_blocks: Sequence[int] = ()
    #: Set for encoder-decoder models.
    cross: CrossTables | None = None
    #: Bias of self-attention: [heads, distances], column d for the key d positions before its query, the last
    #: column for all greater distances; or [heads, queries, keys] by position.
    bias: torch.Tensor | None = None
    #: What each layer reaches; empty: as its attention function is called.
    layer_rules: Sequence[LayerRule] = ()
    backend: str = "sdpa"
    #: Set for models with recurrent layers: the batch is then one sequence, or has one token of each.
    states: RecurrentStates | None = None
    _masks: dict[tuple[int, LayerRule | None], torch.Tensor] = field(default_factory=dict)
    #: What the Triton kernel takes, see `queries_of`.
    queries: dict[tuple[bool, bool], Sequence[PagedQueries]] = field(default_factory=dict)
    #: What the CPU's kernel takes: the step's sequences, and the bounds of the keys of every token. By the
    #: rule of self-attention; None: of cross-attention.
    sequences: dict[LayerRule | None, tuple[Sequences, np.ndarray]] = field(default_factory=dict)

    def decode_mask(self, rule: LayerRule) -> torch.Tensor:
        """[D, 1, 1, blocks * block_size], True where a key is attended to; made once for all layers."""
        return self._mask((-1, rule), lambda: self._decode_mask(rule))

    def _mask(self, key: tuple[int, LayerRule | None], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self._masks:
            self._masks[key] = make()
        return self._masks[key]

    def _decode_mask(self, rule: LayerRule) -> torch.Tensor:
        lengths = self.decode_lengths[:, None]
        position = self._key_positions(self.decode_tables)
        return ((position < lengths) & _near(lengths - 1, position, rule))[:, None, None]

    def _key_positions(self, tables: torch.Tensor) -> torch.Tensor:
        """[1, keys] of gathered tables [D, blocks]."""
        return torch.arange(tables.shape[1] * self.cache.block_size, device=tables.device)[None]

    def cross_mask(self) -> torch.Tensor:
        """[D, 1, 1, blocks * block_size] of the decodes' cross tables."""
        return self._mask((-2, None), self._cross_mask)

    def _cross_mask(self) -> torch.Tensor:
        assert self.cross is not None
        position = self._key_positions(self.cross.decode_tables)
        return (position < self.cross.decode_lengths[:, None])[:, None, None]

    def prefill_mask(self, index: int, rule: LayerRule) -> torch.Tensor:
        """[queries, keys] of prefill `index`."""
        return self._mask((index, rule), lambda: self._prefill_mask(self.prefills[index], rule))

    def _prefill_mask(self, span: PrefillSpan, rule: LayerRule) -> torch.Tensor:
        atomic = span.atomic if rule.spans is not SpanRule.NONE else ()
        query = torch.arange(span.start, span.end, device=self.slots.device)[:, None]
        key = torch.arange(span.end, device=self.slots.device)[None]
        mask, near = key <= query, _near(query, key, rule)
        for start, end in atomic:
            both = (query >= start) & (query < end) & (key >= start) & (key < end)
            mask |= both
            if rule.spans is SpanRule.WHOLE:
                near |= both
        return mask & near


def _near(query: torch.Tensor, key: torch.Tensor, rule: LayerRule) -> torch.Tensor:
    """Whether the rule's window and chunk let a query's position reach a key's."""
    near = key > query - rule.window if rule.window is not None else torch.ones_like(key > query)
    if rule.chunk is not None:
        near &= key // rule.chunk == query // rule.chunk
    return near
