"""Heartbeat of a worker: its registration through outages, and pings that tell whether the store answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from triptych.base.engine_beat import StallClock
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


#: Seconds between two pings, and how long one waits for its answer.
PING_INTERVAL = 0.25
PING_SECONDS = 0.6
#: Seconds without an answer after which the store is out of reach; more than one ping of a slow process.
SILENCE_SECONDS = 1.25
#: Shortest wait for an answer that is not needed.
HURRY_SECONDS = 0.05


class StoreReach:
    """Pings the store inside `async with`, in one event loop.

    `tell` hears of every change, `while_lost` is called after every ping while the store is out of reach.
    """

    def __init__(
        self,
        ping: Callable[[], Awaitable[bool]],
        tell: Callable[[bool], Awaitable[None]],
        while_lost: Callable[[], None],
    ) -> None:
        self._ping = ping
        self._tell = tell
        self._while_lost = while_lost
        self._answers = 0
        self._clock = StallClock(PING_SECONDS)
        self._task: asyncio.Task[None] | None = None
        self.reaches = True

    async def __aenter__(self) -> StoreReach:
        await self._tell(True)
        self._task = asyncio.create_task(self._run(), name="store reach")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_SECONDS):
                    self._answers += await self._ping()
            try:
                await self._look(asyncio.get_running_loop().time())
            except Exception:
                logger.exception("what follows from the store's silence could not be carried out")
            await asyncio.sleep(PING_INTERVAL)

    async def _look(self, now: float) -> None:
        reaches = self._clock.poll(self._answers, now) < SILENCE_SECONDS
        if reaches is not self.reaches:
            self.reaches = reaches
            if reaches:
                logger.info("the store answers again")
            else:
                logger.warning("the store is out of reach: what needs it goes on elsewhere")
            await self._tell(reaches)
        if not reaches:
            self._while_lost()


class StorePatience:
    """Bounds waits for the store's answers where work goes on without them, in one event loop."""

    def __init__(self) -> None:
        self._usual = 0.0
        self._silent_until = 0.0

    @asynccontextmanager
    async def asked(self, seconds: float, *, hurry: bool) -> AsyncIterator[None]:
        """TimeoutError after `seconds`.

        In a hurry after a few times what answers took lately, and at once after a call that has had none.
        """
        now = asyncio.get_running_loop().time
        began = now()
        if hurry:
            seconds = min(seconds, max(HURRY_SECONDS, 4 * self._usual))
            if began < self._silent_until:
                raise TimeoutError
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            self._silent_until = now() + SILENCE_SECONDS
            raise
        self._usual = max(now() - began, 0.9 * self._usual)
