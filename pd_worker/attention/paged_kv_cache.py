"""The paged KV cache: keys and values of all layers in blocks."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Sequence

import torch

from triptych.kernels.cpu_heads import fits, write_cache
from triptych.kernels.library import kernel_library
from triptych.models.base import DecoderSide
from triptych.models.geometry import KVShape


class PagedKVCache:
    """Keys and values of all layers: [num_blocks, block_size, num_kv_heads, head_dim] of the layer each.

    On a CPU they are views of memory that is ordered by head, so that one head's keys of consecutive tokens
    are contiguous; `key_rows` and `value_rows` are the same memory as [1, num_kv_heads, slots, head_dim].
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
    parts, blocks, size, heads, dim = shape
    by_head = torch.frombuffer(pages, dtype=dtype, count=count).view(parts, heads, blocks, size, dim)
    return by_head.permute(0, 2, 3, 1, 4)
