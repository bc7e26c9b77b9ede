"""The proxy's readiness as a kubelet sees it: it follows the PD workers, but does not end with them."""

from __future__ import annotations

from triptych.base.status.service_status import ServiceStatus
from triptych.proxy.pool import WorkerPool
from triptych.proxy.workers import Worker


class PDReadiness:
    """A listener that makes the proxy ready with the first live PD worker; it stays ready after the last one.

    Requests wait for a PD worker that comes back. A Service without any endpoint would refuse them.
    """

    def __init__(self, pool: WorkerPool, status: ServiceStatus) -> None:
        self._pool = pool
        self._status = status
        self._any_live = False

    def degraded(self) -> tuple[str, ...]:
        """What the proxy lacks. Any thread may ask."""
        missing = (("store", self._pool.store_ok), ("PD workers", self._any_live))
        return tuple(name for name, there in missing if not there)

    def workers_changed(self) -> None:
        self._any_live = bool(self._pool.serving("pd"))
        if self._any_live:
            self._status.ready()

    def worker_lost(self, worker: Worker) -> None:
        self.workers_changed()
