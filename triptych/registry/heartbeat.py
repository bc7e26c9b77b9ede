"""A worker's heartbeat in the registry, which continues through an outage of the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from triptych.base.types import WorkerInfo
from triptych.registry.registry import Registry
from triptych.store.control import StoreUnavailable

logger = logging.getLogger(__name__)

#: Seconds between two registrations: two come within a term, so that one may be lost. What dies is not found
#: by this but by its connections, and by a health check as soon as the term is over.
INTERVAL = 2.0


class Heartbeat:
    """A task that registers `info` every `interval` seconds until stopped, in one event loop.

    While the worker is not `healthy` its registration is not renewed, and lapses.
    """

    def __init__(
        self,
        registry: Registry,
        info: WorkerInfo,
        interval: float = INTERVAL,
        healthy: Callable[[], bool] = lambda: True,
    ) -> None:
        self.info = info
        self._healthy = healthy
        self._registry = registry
        self._interval = interval
        self._task: asyncio.Task[None] | None = None
        self._reachable = True
        self._stopping = False

    def degraded(self) -> tuple[str, ...]:
        """What the worker lacks: the store, while it cannot register. Any thread may ask."""
        return () if self._reachable else ("store",)

    def start(self) -> None:
        """Registers at once and starts the task. Idempotent."""
        if self._task is None:
            self._stopping = False
            self._task = asyncio.get_running_loop().create_task(self._beat(), name="heartbeat")

    async def stop(self, withdraw: bool = True) -> None:
        """Ends the task, and withdraws the registration if the store can be reached. Idempotent."""
        if self._task is None:
            return
        # A cancellation that meets a store command may come back as StoreUnavailable: the flag ends the beat.
        self._stopping = True
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        if withdraw:
            try:
                await self._registry.withdraw(self.info)
            except StoreUnavailable as error:
                logger.warning("the registration could not be withdrawn and will expire: %s", error)

    async def _beat(self) -> None:
        while not self._stopping:
            if self._healthy():
                try:
                    await self._register()
                except Exception:
                    # The next one may succeed; if the task ended, new proxies would never find this worker.
                    logger.exception("a registration failed")
            await asyncio.sleep(self._interval)

    async def _register(self) -> None:
        try:
            await self._registry.register(self.info)
        except StoreUnavailable as error:
            if self._reachable:
                logger.warning("cannot register, trying again: %s", error)
            self._reachable = False
        else:
            if not self._reachable:
                logger.info("registered again as %s %s", self.info.pool, self.info.address)
            self._reachable = True
