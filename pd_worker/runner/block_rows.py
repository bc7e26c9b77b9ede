"""Rows of KV blocks: a block's keys and values of all layers as one row, whatever its memory's order is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch

from triptych.base.machine.device import Device
from triptych.pd_worker.attention.metadata import PagedKVCache


class BlockRows:
    """The blocks of a KV cache as rows [width]: the first pool's layers, then the next one's.

    Each layer in the order [block_size, heads, dim], on every device.
    """

    def __init__(self, kv_cache: PagedKVCache) -> None:
        self._device = Device.of(kv_cache.keys[0].device)
        self._parts = [pool.transpose(0, 1) for pool in kv_cache.pools]
        #: Where each part's elements of a block begin, and the end of the last.
        self._bounds = list(accumulate((part[0].numel() for part in self._parts), initial=0))
        self.shapes = [tuple(part.shape[1:]) for part in self._parts]

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self._bounds[-1]

    def gather(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Copies blocks into the first of `rows` [n, width], on the device."""
        for part, target in self._with_parts(rows[: len(blocks)]):
            if self._device.on_host:
                for block, row in zip(blocks, target, strict=True):
                    row.copy_(part[block])
            else:
                target.copy_(part.index_select(0, self._device.upload(torch.tensor(blocks))))

    def scatter(self, blocks: Sequence[int], rows: torch.Tensor) -> None:
        """Copies the first of `rows` [n, width], on the device, into blocks."""
        for part, given in self._with_parts(rows[: len(blocks)]):
            if self._device.on_host:
                for block, row in zip(blocks, given, strict=True):
                    part[block].copy_(row)
            else:
                part.index_copy_(0, self._device.upload(torch.tensor(blocks)), given)

    def _with_parts(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each part of the cache, and what the rows have of it in its shape.

        A device copies all blocks of it at once. On a CPU an operator with an index takes twelve times as
        long as a copy of each block: its memory is ordered by head.
        """
        for part, (begin, end) in zip(self._parts, pairwise(self._bounds), strict=True):
            yield part, rows[:, begin:end].unflatten(1, part.shape[1:])
