"""Metrics of the pools and of the store, as one proxy sees them."""

from __future__ import annotations

from collections import Counter

from triptych.base.metrics import ProxyMetrics
from triptych.proxy.pool import WorkerPool
from triptych.proxy.workers import Worker
from triptych.store.results import StoreMemory

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
