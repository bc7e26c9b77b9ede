"""Places that requests wait for, in their order: bytes of embeddings, and places in vLLM's batch."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from triptych.pd_worker.core.admission import Admission
from triptych.pd_worker.core.request import RequestOrder


class Turns:
    """Waiters in order, the first of which goes on as soon as `free` lets it."""

    def __init__(self) -> None:
        self._waiting: list[tuple[RequestOrder, int, Callable[[], bool], asyncio.Future[None]]] = []
        self._count = 0

    def __len__(self) -> int:
        return sum(not entry[-1].done() for entry in self._waiting)

    async def wait(
        self, order: RequestOrder, take: Callable[[], bool], give_back: Callable[[], None]
    ) -> None:
        """Returns once `take` has succeeded, which is tried for the first waiter only."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._waiting, (order, self._count, take, future))
        self.pump()
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                give_back()
            future.cancel()
            self.pump()
            raise

    def pump(self) -> None:
        """Lets waiters go on, as many as can."""
        while self._waiting:
            _, _, take, future = self._waiting[0]
            if not future.done():
                if not take():
                    return
                future.set_result(None)
            heapq.heappop(self._waiting)


class EmbeddingRoom:
    """Bytes that admitted requests' embeddings may take in the store until vLLM has loaded them."""

    def __init__(self, capacity: int) -> None:
        self._admission = Admission(capacity)
        self._turns = Turns()

    @property
    def reserved(self) -> int:
        return self._admission.reserved

    async def reserve(self, request_id: str, order: RequestOrder, sizes: Mapping[str, int]) -> None:
        """Waits until all of `sizes`, bytes by key, have room. Without items there is no wait."""
        if sizes:
            await self._turns.wait(
                order,
                lambda: self._admission.reserve(request_id, sizes),
                lambda: self._admission.release_request(request_id),
            )

    def release(self, request_id: str) -> None:
        """Idempotent."""
        self._admission.release_request(request_id)
        self._turns.pump()


class BatchPlaces:
    """Places of requests that are at work in vLLM, as many as --max-num-seqs."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._turns = Turns()

    @asynccontextmanager
    async def place(self, order: RequestOrder) -> AsyncIterator[None]:
        """A place, for as long as the context lasts."""
        await self._turns.wait(order, self._take, self._give_back)
        try:
            yield
        finally:
            self._give_back()
            self._turns.pump()

    def _take(self) -> bool:
        if not self._free:
            return False
        self._free -= 1
        return True

    def _give_back(self) -> None:
        self._free += 1
