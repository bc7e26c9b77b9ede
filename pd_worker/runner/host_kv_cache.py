"""The host KV cache: blocks of host memory for the keys and values of swapped requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from triptych.base.machine.device import Device
from triptych.ec_connector.connectors.host_buffers import PinnedMemory
from triptych.pd_worker.attention.metadata import PagedKVCache
from triptych.pd_worker.core.kv_cache.kv_cache_manager import BlockCopy
from triptych.pd_worker.runner.block_rows import BlockRows

#: Blocks that are gathered on the device at a time.
_STAGED_BLOCKS = 16


class HostKVCache:
    """Host blocks, each with the keys and values of all layers, so that adjacent blocks are one copy.

    For an accelerator the memory is page-locked once, at start, and copies run in a stream of their own:
    `write` returns when its source blocks may be overwritten, `read` when its target blocks may be read,
    `wait` when all copies are complete.

    On a CPU its pages come at first use, each once: 0.4 ms a MiB beside 0.25 for its copy. Taking them early
    would hold all of --swap-memory from the start, for 0.1 s once in 256 MiB's use.
    """

    def __init__(self, kv_cache: PagedKVCache, num_blocks: int) -> None:
        first = kv_cache.keys[0]
        device = first.device
        self._rows = BlockRows(kv_cache)
        width = self._rows.width
        nbytes = num_blocks * width * first.element_size()
        self._owner = Device.of(device)
        self._memory = PinnedMemory(nbytes, self._owner)
        #: [num_blocks, elements of the first pool's layers, then of the next one's]
        self.blocks = self._memory.bytes.view(first.dtype).view(num_blocks, width)
        staged = min(num_blocks, _STAGED_BLOCKS)
        self._staging = torch.zeros((staged, width), dtype=first.dtype, device=device)
        self._stream = self._owner.copy_stream()

    def write(self, copies: Sequence[BlockCopy]) -> None:
        """KV blocks to host blocks."""
        with self._stream.after_model():
            for batch in self._batches(copies):
                self._rows.gather([copy.source for copy in batch], self._staging)
                for start, stop, block in _runs([copy.target for copy in batch]):
                    rows = self.blocks[block : block + stop - start]
                    rows.copy_(self._staging[start:stop], non_blocking=True)
        self._stream.block_model()

    def read(self, copies: Sequence[BlockCopy]) -> None:
        """Host blocks to KV blocks; returns when they are there."""
        with self._stream.after_model():
            for batch in self._batches(copies):
                for start, stop, block in _runs([copy.source for copy in batch]):
                    rows = self.blocks[block : block + stop - start]
                    self._staging[start:stop].copy_(rows, non_blocking=True)
                self._rows.scatter([copy.target for copy in batch], self._staging)
        self._stream.block_model()
        self.wait()

    def wait(self) -> None:
        """Returns when all copies are done; raises what one of them has failed with."""
        self._stream.synchronize()

    def close(self) -> None:
        """Unlocks the memory. Idempotent."""
        self.wait()
        self._memory.close()

    def _batches(self, copies: Sequence[BlockCopy]) -> Iterator[Sequence[BlockCopy]]:
        for first in range(0, len(copies), _STAGED_BLOCKS):
            yield copies[first : first + _STAGED_BLOCKS]


def copy_blocks(
    source: PagedKVCache | HostKVCache, target: PagedKVCache | HostKVCache, copies: Sequence[BlockCopy]
) -> None:
    """Copies blocks of all layers to host memory or back; one of the two is the host's."""
    if not copies:
        return
    if isinstance(target, HostKVCache):
        target.write(copies)
    elif isinstance(source, HostKVCache):
        source.read(copies)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(start, stop, first block) of each stretch of consecutive numbers."""
    start = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            yield start, index, blocks[start]
            start = index
