"""Copies of KV blocks and states between a model runner's memory and host memory, on the engine's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from triptych.base.machine.device import Device
from triptych.pd_worker.attention.metadata import PagedKVCache
from triptych.pd_worker.runner.block_rows import BlockRows
from triptych.pd_worker.runner.state_pool import StatePool


class KVCopier:
    """Copies from a device run in a stream of their own: their memory is whole once the wait, which comes
    with it, returns. None: it is whole.
    """

    def __init__(self, kv_cache: PagedKVCache, states: StatePool | None) -> None:
        first = kv_cache.keys[0]
        self._dtype, self._device = first.dtype, first.device
        self._owner = Device.of(first.device)
        self._stream = self._owner.copy_stream()
        self.rows = BlockRows(kv_cache)
        self._states = states

    @torch.inference_mode()
    def take(self, blocks: Sequence[int]) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """A copy of blocks in host memory, uint8 [bytes]."""
        rows = torch.empty((len(blocks), self.rows.width), dtype=self._dtype, device=self._device)
        self.rows.gather(blocks, rows)
        return self._to_host(rows.view(-1).view(torch.uint8))

    @torch.inference_mode()
    def put(self, blocks: Sequence[int], rows: torch.Tensor, which: Sequence[int]) -> None:
        """Writes the rows `which` of some blocks' bytes, uint8 [n, bytes], into blocks."""
        taken = rows if len(which) == len(rows) else rows[list(which)]
        self.rows.scatter(blocks, taken.view(self._dtype).to(self._device))

    @torch.inference_mode()
    def take_state(self, slot: int) -> tuple[torch.Tensor, Callable[[], None] | None]:
        """A copy of the states in a slot, uint8 [bytes]."""
        assert self._states is not None
        return self._to_host(self._states.read(slot))

    @torch.inference_mode()
    def put_state(self, slot: int, body: torch.Tensor) -> None:
        """Writes states into a slot."""
        assert self._states is not None
        self._states.write(slot, body.to(self._device))

    def _to_host(self, content: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None] | None]:
        if self._owner.on_host:
            return content, None
        with self._stream.after_model():
            host = torch.empty(content.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(content, non_blocking=True)
        self._stream.keep(content)
        return host, self._stream.mark()
