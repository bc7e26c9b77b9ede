"""Room for embeddings, and places in vLLM's batch: what its requests wait for, in turns between tenants."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from triptych.pd_worker.core.admission import Admission, AdmissionQueue
from triptych.pd_worker.core.request import OwnOrder
from triptych.pd_worker.core.tenant_turns import TenantTurns


@dataclass(eq=False, slots=True)
class _Waiter:
    request_id: str
    own_order: OwnOrder
    tenant: str
    sizes: Mapping[str, int]
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class EmbeddingMemory:
    """Bytes that admitted requests' embeddings may take in the store until vLLM has loaded them."""

    def __init__(self, capacity: int, turns: TenantTurns) -> None:
        self._admission = Admission(capacity)
        self._queue = AdmissionQueue[_Waiter](turns)

    @property
    def reserved(self) -> int:
        return self._admission.reserved

    @property
    def full(self) -> bool:
        return self._admission.reserved >= self._admission.capacity

    async def reserve(self, request_id: str, order: OwnOrder, sizes: Mapping[str, int], tenant: str) -> None:
        """Waits until all of `sizes`, bytes by key, have room, in turns. Without items there is no wait."""
        waiter = _Waiter(request_id, order, tenant, sizes)
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

    def resize(self, capacity: int) -> None:
        """Another capacity from now on; what is reserved stays."""
        if capacity != self._admission.capacity:
            self._admission.capacity = capacity
            self._pump()

    def _pump(self) -> None:
        for waiter, _ in self._queue.admit(self._take):
            if not waiter.turn.done():
                waiter.turn.set_result(None)

    def _take(self, waiter: _Waiter) -> bool:
        # A cancelled wait leaves the queue here, should its task not have run since.
        return waiter.turn.done() or self._admission.reserve(waiter.request_id, waiter.sizes)


class _Batch(EmbeddingMemory):
    """Places by name, each of the size 1; whose they are counts from the moment in which they are given."""

    def __init__(self, places: int, turns: TenantTurns) -> None:
        super().__init__(places, turns)
        self._turns = turns
        self._tenants: dict[str, str] = {}

    def release(self, request_id: str) -> None:
        if (tenant := self._tenants.pop(request_id, None)) is not None:
            self._turns.stop(tenant)
        super().release(request_id)

    def _take(self, waiter: _Waiter) -> bool:
        if waiter.turn.done() or not super()._take(waiter):
            return waiter.turn.done()
        self._tenants[waiter.request_id] = waiter.tenant
        self._turns.start(waiter.tenant)
        return True


@dataclass(eq=False, slots=True)
class BatchPlace:
    """A place in vLLM's batch, and how its holder is asked to leave it; one that is not asked twice."""

    order: OwnOrder
    tenant: str
    leave: Callable[[], None] | None = None


class BatchPlaces:
    """Places of requests that are at work in vLLM, as many as it computes at once, in turns between tenants.

    Where all are taken, the tenant with the most leaves one to a tenant that has none; `gave_way` is called.
    """

    def __init__(self, places: int, turns: TenantTurns, gave_way: Callable[[], None] = lambda: None) -> None:
        self._room = _Batch(places, turns)
        self._turns = turns
        self._gave_way = gave_way
        self._names = map(str, itertools.count())
        self._held: dict[str, BatchPlace] = {}
        #: Tenants for which a place is being left.
        self._expected: set[str] = set()

    def resize(self, places: int) -> None:
        """As many from now on; who has one keeps it."""
        self._room.resize(places)

    @asynccontextmanager
    async def place(self, order: OwnOrder, tenant: str) -> AsyncIterator[BatchPlace]:
        """A place, for as long as the context lasts."""
        name = next(self._names)
        self._have_one_left(tenant)
        try:
            await self._room.reserve(name, order, {name: 1}, tenant)
        finally:
            self._expected.discard(tenant)
        place = self._held[name] = BatchPlace(order, tenant)
        try:
            yield place
        finally:
            del self._held[name]
            self._room.release(name)

    def _have_one_left(self, tenant: str) -> None:
        if not self._room.full or self._turns.running(tenant) or tenant in self._expected:
            return
        richest = self._turns.richest()
        able = [place for place in self._held.values() if place.tenant == richest and place.leave is not None]
        if able:
            last = max(able, key=lambda place: place.order)
            leave, last.leave = last.leave, None
            self._expected.add(tenant)
            self._gave_way()
            assert leave is not None
            leave()
