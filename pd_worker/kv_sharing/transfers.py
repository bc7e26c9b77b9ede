"""Transfers of KV blocks to and from the store, in an event loop of their own, within byte budgets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from triptych.base.errors import TriptychError
from triptych.base.types import ItemPlan
from triptych.ec_connector.connectors.host_buffers import HostBudget
from triptych.ec_connector.connectors.store_client import StoreClient
from triptych.store import keys
from triptych.store.bulk import Loaded, Missing, SaveResult
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.kv_budget import KVBudget

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Values that are written at once.
_SAVES = 8
#: Seconds without transfers after the store has not answered, and between two lines of the log about it.
_AWAY_SECONDS, _SAY_SECONDS = 5.0, 30.0
#: Values of one look-up, each of which is answered with up to 4 KiB.
_LOOKED_UP = 64


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value on its way to the store: host memory that is whole once `wait`, from any thread, returns."""

    plan: ItemPlan
    body: torch.Tensor
    wait: Callable[[], None] | None = None


class KVTransfers:
    """The client of the store of KV blocks: half of `memory` for saves on their way, half for loads.

    `share` is what blocks may take of the store's memory.
    """

    def __init__(self, url: str, memory: int, share: float) -> None:
        self._client = StoreClient(url, kind=keys.KV)
        self._share = share
        self._budget: KVBudget | None = None
        self._limit = memory // 2
        self._saving = 0
        self._lock = threading.Lock()
        self._slots = asyncio.Semaphore(_SAVES)
        self._loads = HostBudget(memory // 2)
        self._away_until = self._said_at = float("-inf")

    @property
    def away(self) -> bool:
        """The store has just not answered."""
        return time.monotonic() < self._away_until

    def start(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Runs `work` in the loop; StoreUnavailable once this is closed."""
        return self._client.submit(work)

    def close(self) -> None:
        """Ends all transfers. Idempotent."""
        if not self._client.closed:
            self._client.closed = True
            self._client.close()

    def has_room(self, nbytes: int) -> bool:
        """Whether a value of this size may wait for its save."""
        return not self.away and self._saving + nbytes <= self._limit

    def save(self, value: SavedValue, tenant: str, ttl: float) -> Future[bool]:
        """Saves a value for which there is room; whether it is stored."""
        with self._lock:
            self._saving += value.plan.nbytes
        return self.start(self._save(value, tenant, ttl))

    async def _save(self, value: SavedValue, tenant: str, ttl: float) -> bool:
        try:
            if value.wait is not None:
                await asyncio.to_thread(value.wait)
            async with self._slots:
                return await self._stored(value, tenant, ttl)
        except (TriptychError, RuntimeError) as error:
            self.failed(error)
            return False
        finally:
            with self._lock:
                self._saving -= value.plan.nbytes

    async def _stored(self, value: SavedValue, tenant: str, ttl: float) -> bool:
        store, budget = await self._connected()
        plan = value.plan
        if await store.look_up([(plan.mm_hash, plan.namespace)]) == [plan]:
            await budget.touch(tenant, [(plan.mm_hash, plan.nbytes)])
            return True
        if not await budget.take(tenant, plan.mm_hash, plan.nbytes, ttl):
            return False
        body = memoryview(value.body.numpy().data).cast("B")
        if await store.save(plan, body, ttl=ttl) is not SaveResult.ALREADY:
            return True
        if await store.look_up([(plan.mm_hash, plan.namespace)]) == [plan]:
            return True  # another worker was first
        # A value that no reader takes holds its key.
        if await self.load(plan) is not None:
            self._loads.release(plan.nbytes)
        return await store.save(plan, body, ttl=ttl) is not SaveResult.ALREADY

    async def _connected(self) -> tuple[EmbeddingStore, KVBudget]:
        store = await self._client.store()
        if self._budget is None:
            self._budget = KVBudget(store.topology, store.control, self._share)
        return store, self._budget

    def failed(self, error: BaseException) -> None:
        """The store has not answered, or a copy found no memory: tried again some seconds later."""
        self._away_until = time.monotonic() + _AWAY_SECONDS
        if self._away_until > self._said_at + _SAY_SECONDS:
            self._said_at = self._away_until
            logger.warning("KV blocks are not shared for %g s: %s", _AWAY_SECONDS, error or repr(error))

    async def find(self, plans: Sequence[ItemPlan], tenant: str) -> int:
        """How many of these values are stored before the first that is not. StoreUnavailable."""
        store, budget = await self._connected()
        found = 0
        for first in range(0, len(plans), _LOOKED_UP):
            batch = plans[first : first + _LOOKED_UP]
            there = await store.look_up([(plan.mm_hash, plan.namespace) for plan in batch])
            found += next((i for i, plan in enumerate(batch) if there[i] != plan), len(batch))
            if found < first + len(batch):
                break
        if found:
            await budget.touch(tenant, [(plan.mm_hash, plan.nbytes) for plan in plans[:found]])
        return found

    async def first_of(self, plans: Sequence[ItemPlan], most: int) -> int | None:
        """The index of the first of these values that is stored, among the first `most`. StoreUnavailable."""
        store, _ = await self._connected()
        for first in range(0, min(len(plans), most), _LOOKED_UP):
            batch = plans[first : first + _LOOKED_UP]
            there = await store.look_up([(plan.mm_hash, plan.namespace) for plan in batch])
            for index, plan in enumerate(batch):
                if there[index] == plan:
                    return first + index
        return None

    async def load(self, plan: ItemPlan) -> torch.Tensor | None:
        """A value's bytes, uint8, which count until `release`; None for one that is gone or damaged.

        StoreUnavailable.
        """
        if plan.nbytes > self._loads.limit:
            return None
        await self._loads.acquire(plan.nbytes)
        kept = False
        try:
            store, _ = await self._connected()
            body = torch.empty(plan.nbytes, dtype=torch.uint8)
            memory = memoryview(body.numpy().data)
            result = await store.load(plan, lambda nbytes: memory)
            kept = isinstance(result, Loaded)
            if isinstance(result, Missing) and result.damaged_digest:
                logger.info("KV blocks in the store are damaged, and deleted: %s", result.reason)
                await store.drop_damaged(plan.mm_hash, result.damaged_digest)
            return body if kept else None
        finally:
            if not kept:
                self._loads.release(plan.nbytes)

    def release(self, nbytes: int) -> None:
        """Loaded bytes are not needed any more; from any thread."""
        self.call_soon(partial(self._loads.release, nbytes))

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Calls back in the loop; from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its memory with it
            self._client.call_soon(callback)
