"""The host KV cache: blocks of host memory for the keys and values of swapped requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from triptych.ec_connector.connectors.host_buffers import PinnedMemory
from triptych.pd_worker.attention.paged_kv_cache import PagedKVCache
from triptych.pd_worker.core.kv_cache.swap import BlockCopy

#: Blocks that are gathered on the device at a time.
_STAGED_BLOCKS = 16


class HostKVCache:
    """Host blocks, each with the keys and values of all layers, so that adjacent blocks are one copy.

    On CUDA the memory is page-locked once, at start, and copies run on a stream of their own: `write` returns
    when its source blocks may be overwritten, `read` when its target blocks may be read, `wait` when all
    copies are complete.
    """

    def __init__(self, kv_cache: PagedKVCache, num_blocks: int) -> None:
        first = kv_cache.keys[0]
        device = first.device
        self._parts = [*kv_cache.keys, *kv_cache.values]
        shape = (len(self._parts), *first.shape[1:])
        nbytes = num_blocks * len(self._parts) * first[0].numel() * first.element_size() if num_blocks else 0
        self._memory = PinnedMemory(nbytes, lock=device.type == "cuda")
        #: [num_blocks, 2 * layers, block_size, num_kv_heads, head_dim]
        self.blocks = self._memory.bytes.view(first.dtype).view(num_blocks, *shape)
        staged = min(num_blocks, _STAGED_BLOCKS)
        self._staging = torch.zeros((staged, *shape), dtype=first.dtype, device=device)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and num_blocks:
            self._stream = torch.cuda.Stream(device)

    def write(self, copies: Sequence[BlockCopy]) -> None:
        """KV blocks to host blocks."""
        with self._on_stream():
            for batch in self._batches(copies):
                taken = torch.tensor([copy.source for copy in batch], device=self._staging.device)
                for index, part in enumerate(self._parts):
                    self._staging[: len(batch), index] = part.index_select(0, taken)
                for start, stop, block in _runs([copy.target for copy in batch]):
                    rows = self.blocks[block : block + stop - start]
                    rows.copy_(self._staging[start:stop], non_blocking=True)
        self._block_model_stream()

    def read(self, copies: Sequence[BlockCopy]) -> None:
        """Host blocks to KV blocks; returns when they are there."""
        with self._on_stream():
            for batch in self._batches(copies):
                for start, stop, block in _runs([copy.source for copy in batch]):
                    rows = self.blocks[block : block + stop - start]
                    self._staging[start:stop].copy_(rows, non_blocking=True)
                given = torch.tensor([copy.target for copy in batch], device=self._staging.device)
                for index, part in enumerate(self._parts):
                    part.index_copy_(0, given, self._staging[: len(batch), index])
        self._block_model_stream()
        self.wait()

    def wait(self) -> None:
        """Returns when all copies are done; raises what one of them has failed with."""
        if self._stream is not None:
            self._stream.synchronize()

    def close(self) -> None:
        """Unlocks the memory. Idempotent."""
        self.wait()
        self._memory.close()

    def _batches(self, copies: Sequence[BlockCopy]) -> Iterator[Sequence[BlockCopy]]:
        for first in range(0, len(copies), _STAGED_BLOCKS):
            yield copies[first : first + _STAGED_BLOCKS]

    def _on_stream(self) -> AbstractContextManager[object]:
        """The copy stream, which waits for all work queued on the model's stream."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._staging.device))
        return torch.cuda.stream(self._stream)

    def _block_model_stream(self) -> None:
        """Makes the model's stream wait for the copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._staging.device).wait_stream(self._stream)


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
