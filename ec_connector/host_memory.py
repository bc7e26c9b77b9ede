"""Host memory of the worker role: a byte budget, and tensors that the socket receives into."""

from __future__ import annotations

import asyncio
from collections import deque

import torch

from triptych.types import ItemPlan

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class HostBudget:
    """Bytes that host copies may take, given out in order. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, nbytes: int) -> None:
        """Waits until there is room; a caller that is cancelled leaves the queue."""
        if not self._waiting and self.used + nbytes <= self.limit:
            self.used += nbytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.used -= nbytes
            self._serve()
            raise

    def give(self, nbytes: int) -> None:
        """Returns bytes that were taken."""
        self.used -= nbytes
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            nbytes, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
            elif self.used + nbytes <= self.limit:
                self._waiting.popleft()
                self.used += nbytes
                turn.set_result(None)
            else:
                return


class HostBuffer:
    """Memory for one load; `tensor` shares it. Pinned for CUDA, where only such memory copies beside work."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._memory = torch.empty(0, dtype=torch.uint8)

    def into(self, nbytes: int) -> memoryview:
        """New memory of exactly `nbytes`."""
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory.numpy().data

    def tensor(self, plan: ItemPlan, offset: int) -> torch.Tensor:
        """[rows, width] over the bytes from `offset` on, without a copy."""
        flat = self._memory[offset : offset + plan.nbytes]
        return flat.view(_DTYPES[plan.dtype]).view(plan.rows, plan.width)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
