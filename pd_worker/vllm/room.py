"""What requests wait for, in their order: bytes of embeddings, and places in vLLM's batch."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from triptych.pd_worker.core.admission import Admission, AdmissionQueue
from triptych.pd_worker.core.request import RequestOrder


@dataclass(eq=False, slots=True)
class _Waiter:
    request_id: str
    order: RequestOrder
    sizes: Mapping[str, int]
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class EmbeddingRoom:
    """Bytes that admitted requests' embeddings may take in the store until vLLM has loaded them."""

    def __init__(self, capacity: int) -> None:
        self._admission = Admission(capacity)
        self._queue = AdmissionQueue[_Waiter]()

    @property
    def reserved(self) -> int:
        return self._admission.reserved

    async def reserve(self, request_id: str, order: RequestOrder, sizes: Mapping[str, int]) -> None:
        """Waits until all of `sizes`, bytes by key, have room. Without items there is no wait."""
        waiter = _Waiter(request_id, order, sizes)
        self._queue.add(waiter, has_items=bool(sizes))
        self._pump()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            self._queue.discard(waiter)
            self.release(request_id)
            raise

    def release(self, request_id: str) -> None:
        """Idempotent."""
        self._admission.release_request(request_id)
        self._pump()

    def _pump(self) -> None:
        for waiter, _ in self._queue.admit(self._take):
            if not waiter.turn.done():
                waiter.turn.set_result(None)

    def _take(self, waiter: _Waiter) -> bool:
        # A cancelled wait leaves the queue here, should its task not have run since.
        return waiter.turn.done() or self._admission.reserve(waiter.request_id, waiter.sizes)


class BatchPlaces:
    """Places of requests that are at work in vLLM, as many as --max-num-seqs."""

    def __init__(self, places: int) -> None:
        self._room = EmbeddingRoom(places)
        self._names = map(str, itertools.count())

    @asynccontextmanager
    async def place(self, order: RequestOrder) -> AsyncIterator[None]:
        """A place, for as long as the context lasts."""
        name = next(self._names)
        await self._room.reserve(name, order, {name: 1})
        try:
            yield
        finally:
            self._room.release(name)
