"""The paged KV cache, and the attention metadata of one step, which are the same for all layers."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from triptych.kernels.cpu_attention import Sequences, fits, write_cache
from triptych.kernels.library import kernel_library
from triptych.models.base import DecoderSide
from triptych.models.geometry import KVShape, LayerRule, SpanRule
from triptych.models.recurrent import RecurrentStates

if TYPE_CHECKING:
    from triptych.kernels.paged_attention import PagedQueries


#: Version of the layout of keys and values in memory, for whatever takes their bytes elsewhere: the order of
#: [parts, heads, blocks, positions, dim] on a CPU, of [parts, blocks, positions, heads, dim] elsewhere.
LAYOUT_VERSION = 1


class PagedKVCache:
    """Keys and values of all layers: [num_blocks, block_size, num_kv_heads, head_dim] of the layer each.

    On a CPU they are views of memory that is ordered by head, so that one head's keys of consecutive tokens
    are contiguous, as `kernels/attention.h` reads them; `key_rows` and `value_rows` are the same memory as
    [1, num_kv_heads, slots, head_dim].
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_shapes: Sequence[KVShape] = (),
    ) -> None:
        """`kv_shapes` are those of each layer, where they are not all of `num_kv_heads` and `head_dim`."""
        shapes = kv_shapes or (KVShape(num_kv_heads, head_dim, head_dim),) * num_layers
        first = (num_blocks, block_size)
        self.block_size = block_size
        # Zeros: gathered values must never be NaN, even where they are masked.
        keys, values = [(s.heads, s.key_dim) for s in shapes], [(s.heads, s.value_dim) for s in shapes]
        counts = Counter([*keys, *values])
        #: Keys and values of all layers, in one tensor [n, *their shape] for each shape: what is done to all
        #: is one operator.
        self.pools = [_zeros((counts[part], *first, *part), dtype, device) for part in counts]
        views = {part: iter(pool) for part, pool in zip(counts, self.pools, strict=True)}
        self.keys: list[torch.Tensor] = [next(views[part]) for part in keys]
        self.values: list[torch.Tensor] = [next(views[part]) for part in values]
        self.key_rows = [keys.flatten(0, 1).transpose(0, 1)[None] for keys in self.keys]
        self.value_rows = [values.flatten(0, 1).transpose(0, 1)[None] for values in self.values]
        self._by_kernel = device.type == "cpu" and kernel_library() is not None
        #: Keys and values of other dtypes stay far below their limits.
        self.may_overflow = dtype == torch.float16
        #: Tokens of the batch whose keys and values were finite in all layers so far; None: not recorded.
        self.finite: torch.Tensor | None = None

    @classmethod
    def of_decoder(cls, decoder: DecoderSide, *, num_blocks: int, block_size: int) -> PagedKVCache:
        """A cache for the decoder's layers, of its dtype and on its device."""
        geometry = decoder.geometry
        return cls(
            num_layers=geometry.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            dtype=decoder.dtype,
            device=decoder.device,
            kv_shapes=geometry.kv_shapes,
        )

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(part[0, 0].numel() * part.element_size() for part in (*self.keys, *self.values))

    @property
    def layer_bytes(self) -> int:
        """Bytes of one token in the layer with the widest keys and values."""
        pairs = zip(self.keys, self.values, strict=True)
        return max((k[0, 0].numel() + v[0, 0].numel()) * k.element_size() for k, v in pairs)

    def slots(self, block_ids: Sequence[int], count: int) -> torch.Tensor:
        """Slots [count] of the first `count` tokens of a table, int64."""
        first = torch.tensor(block_ids, dtype=torch.int64)[:, None] * self.block_size
        slots = (first + torch.arange(self.block_size)).flatten()[:count]
        return slots.to(self.keys[0].device)

    def watch(self, num_tokens: int) -> None:
        """Begins a batch: `finite` records its tokens from now on."""
        if self.may_overflow:
            self.finite = torch.ones(num_tokens, dtype=torch.bool, device=self.keys[0].device)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key and value [T, num_kv_heads, head_dim] at `slots` [T]."""
        if self.finite is not None and len(self.finite) == len(key):
            self.finite &= (key.isfinite() & value.isfinite()).flatten(1).all(-1)
        rows = self.key_rows[layer][0], self.value_rows[layer][0]
        if self._by_kernel and fits(rows[0], key) and fits(rows[1], value):
            write_cache(*rows, slots, key, value)
            return
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value)

    def clear(self, slots: torch.Tensor) -> None:
        """Zeros at `slots` [T] of all layers."""
        for pool in self.pools:
            pool.flatten(1, 2).index_fill_(1, slots, 0)


def _zeros(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU by head, in pages that are allocated at first use: a large cache starts at once."""
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # In pages of 2 MiB where the system has them: each step reads all keys and values of its sequences.
    with contextlib.suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    parts, blocks, size, heads, dim = shape
    by_head = torch.frombuffer(pages, dtype=dtype, count=count).view(parts, heads, blocks, size, dim)
    return by_head.permute(0, 2, 3, 1, 4)


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
