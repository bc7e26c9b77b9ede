"""Periodic work of a proxy: its share of the store, cleanup, its heap, and the metrics of pools and store."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import Callable

from triptych.base.config import ProxyConfig
from triptych.base.machine.heap import trim_heap
from triptych.base.metrics import ProxyMetrics
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.pool import WorkerPool
from triptych.proxy.workers import Worker
from triptych.registry.leases import Leases
from triptych.registry.registry import Registry
from triptych.store.bulk import StoreMemory
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

COLLECT_SECONDS = 60.0
#: Share of the store that one proxy may fill when the store has no byte budget of its own.
DEFAULT_STORE_BYTES = 1 << 30


async def release_memory() -> None:
    """Collects cycles and returns free memory to the system, once in a while.

    Between two rare collections a cycle or two of every broken stream pile up, and each pile leaves the heap
    with holes: without this a proxy grows for hours, though it holds no more.
    """
    gc.collect()
    # In a thread: it takes long, and needs no interpreter lock.
    await asyncio.to_thread(trim_heap)


class Upkeep:
    """The periodic work: refreshes the share of published bytes, and removes what dead processes left."""

    def __init__(
        self,
        config: ProxyConfig,
        store: EmbeddingStore,
        pool: WorkerPool,
        dispatcher: Dispatcher,
        show_store: Callable[[StoreMemory], None] = lambda memory: None,
    ) -> None:
        self._show_store = show_store
        self._config = config
        self._store = store
        self._pool = pool
        self._dispatcher = dispatcher
        self._registry = Registry(store)
        self._leases = Leases(store)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._forever(), name="upkeep")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def poll(self) -> None:
        """Half of the store's memory, divided by the live proxies, is this proxy's share."""
        nbytes = self._config.store_memory
        try:
            memory = await self._store.memory()
        except StoreUnavailable:
            if not nbytes:
                return
        else:
            self._show_store(memory)
            nbytes = nbytes or memory.max_bytes
        share = (nbytes or DEFAULT_STORE_BYTES) // 2 // self._pool.proxies
        self._dispatcher.set_share(share)

    async def collect(self) -> None:
        """Deletes registrations and leases ten minutes past their deadline, and releases memory."""
        await release_memory()
        with contextlib.suppress(StoreUnavailable):
            await self._registry.collect_dead()
            await self._leases.collect_dead()

    async def _forever(self) -> None:
        rounds = int(COLLECT_SECONDS / 5)
        while True:
            for _ in range(rounds):
                await asyncio.sleep(5.0)
                await self.poll()
            await self.collect()


_POOLS = ("encoder", "pd")


class PoolMetrics:
    """A `WorkersListener` that counts workers that stall, are lost or are replaced at their address."""

    def __init__(self, workers: WorkerPool, metrics: ProxyMetrics) -> None:
        self._workers = workers
        self._metrics = metrics
        self._incarnations: dict[tuple[str, str], str] = {}
        #: What the store has said of itself last.
        self.memory: StoreMemory | None = None
        for pool in _POOLS:
            metrics.worker_losses.labels(pool)
            metrics.worker_restarts.labels(pool)
        metrics.store_up.set_function(lambda: float(workers.store_ok))
        workers.subscribe(self)
        self.workers_changed()

    def workers_changed(self) -> None:
        known = self._workers.workers
        stalled = Counter(w.info.pool for w in known.values() if w.alive and w.registered and not w.serving)
        for pool in _POOLS:
            self._metrics.workers_stalled.labels(pool).set(stalled[pool])
        before, self._incarnations = self._incarnations, {k: w.info.incarnation for k, w in known.items()}
        for key, incarnation in self._incarnations.items():
            if before.get(key, incarnation) != incarnation and key[0] in _POOLS:
                self._metrics.worker_restarts.labels(key[0]).inc()

    def worker_lost(self, worker: Worker) -> None:
        # One that has drained has withdrawn its registration before.
        if worker.registered and worker.info.pool in _POOLS:
            self._metrics.worker_losses.labels(worker.info.pool).inc()

    def store(self, memory: StoreMemory) -> None:
        """Shows what the store says of itself; a store that was started again counts from 0."""
        self._metrics.store_used_bytes.set(memory.used_bytes)
        self._metrics.store_max_bytes.set(memory.max_bytes)
        if self.memory is not None:
            before = self.memory.evicted_keys
            restarted = memory.evicted_keys < before
            self._metrics.store_evictions.inc(memory.evicted_keys - (0 if restarted else before))
        self.memory = memory
