"""Host memory of the worker role: a byte budget, and the buffers that embeddings are received into.

An item takes `ItemPlan.nbytes` here, exactly what admission and the encoder cache count for it: no header and
no rounding, so that items that add up to the limit fit together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import torch

from triptych.ec_connector.connectors.pinned_memory import PinnedPool


class HostBudget:
    """A byte budget for host copies, granted in order of arrival. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, nbytes: int) -> None:
        """Waits until there is room; a caller that is cancelled leaves the queue."""
        if not self._waiting and self.used + nbytes <= self.limit:
            self.used += nbytes
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self.used -= nbytes
            self._grant()
            raise

    def release(self, nbytes: int) -> None:
        """Returns bytes that were acquired."""
        self.used -= nbytes
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            nbytes, granted = self._waiting[0]
            if granted.cancelled():
                self._waiting.popleft()
            elif self.used + nbytes <= self.limit:
                self._waiting.popleft()
                self.used += nbytes
                granted.set_result(None)
            else:
                return


class HostBuffer:
    """Memory for one item: uint8 tensors that hold its bytes in sequence."""

    def __init__(self, pieces: Sequence[torch.Tensor]) -> None:
        self.pieces = pieces

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def views(self) -> list[memoryview]:
        """The same memory, piece by piece."""
        return [piece.numpy().data for piece in self.pieces]


class HostMemory:
    """An allocator of buffers within `limit` bytes, for one event loop.

    Buffers come from the pool if there is one, else from ordinary memory in one piece.
    """

    def __init__(self, limit: int, pool: PinnedPool | None = None) -> None:
        self._budget = HostBudget(limit)
        self._pool = pool

    @property
    def limit(self) -> int:
        return self._budget.limit

    @property
    def used(self) -> int:
        return self._budget.used

    async def acquire(self, nbytes: int) -> HostBuffer:
        """Waits until there is room. MemoryError or RuntimeError when allocation fails."""
        await self._budget.acquire(nbytes)
        try:
            return HostBuffer(self._pool.allocate(nbytes) if self._pool is not None else [_plain(nbytes)])
        except BaseException:
            self._budget.release(nbytes)
            raise

    def release(self, buffer: HostBuffer) -> None:
        """Frees a buffer that no transfer uses any more."""
        if self._pool is not None:
            self._pool.free(buffer.pieces)
        self._budget.release(buffer.nbytes)


def _plain(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
