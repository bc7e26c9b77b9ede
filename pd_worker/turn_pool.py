"""Threads of a PD worker that prepare input or answer queries, in turns between tenants."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from triptych.base.errors import Unavailable
from triptych.base.least_service import RecentHolders, TurnQueue

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Work:
    tenant: str
    run: Callable[[], Any]
    wanted: Callable[[], bool]
    large: bool
    result: asyncio.Future[Any]


class TurnPool:
    """An executor of which so many `places` are used; belongs to one event loop.

    What waits for a place is no thread's yet: the tenant whose work has taken least time is next, with that
    of its lowest priority. Large work has all places but one, so that small work waits for none of it. So has
    the small work of one tenant beside others: theirs does not wait, and an engine's thread for fewer.
    """

    def __init__(
        self, executor: Executor, places: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._executor = executor
        self._free = places
        self._most = self._free_for_large = max(places - 1, 1)
        self._recent = RecentHolders(clock)
        #: Small work in threads, by tenant.
        self._running = Counter[str]()
        self._clock = clock
        self._small, self._large = TurnQueue[_Work](), TurnQueue[_Work]()
        self._loop = asyncio.get_running_loop()

    async def run(
        self,
        tenant: str,
        work: Callable[[], R],
        wanted: Callable[[], bool] = lambda: True,
        *,
        large: bool = False,
        priority: int = 0,
    ) -> R:
        """What `work` returns or raises in a thread. Unavailable where it is not `wanted` any more when its
        turn comes; one whose caller is cancelled before is left out."""
        result: asyncio.Future[R] = self._loop.create_future()
        self._recent.note(tenant)
        queue = self._large if large else self._small
        queue.put(tenant, _Work(tenant, work, wanted, large, result), priority)
        self._start()
        return await result

    def shutdown(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        while (work := self._next()) is not None:
            if work.result.done():
                continue
            if not work.wanted():
                work.result.set_exception(Unavailable("the request was cancelled before it began"))
                continue
            try:
                future = self._executor.submit(work.run)
            except RuntimeError:
                work.result.set_exception(Unavailable("this worker is shutting down", retry_after=1.0))
                continue
            self._free -= 1
            self._free_for_large -= work.large
            self._running[work.tenant] += not work.large
            future.add_done_callback(partial(self._tell, work, self._clock()))

    def _next(self) -> _Work | None:
        """Large work first, where it may have a place: small work does without that one."""
        if self._large and min(self._free, self._free_for_large):
            return self._large.take()[1]
        if self._free and (tenants := list(filter(self._may_begin, self._small.tenants))):
            return self._small.take(tenants)[1]
        return None

    def _may_begin(self, tenant: str) -> bool:
        return self._running[tenant] < self._most or not self._recent.several

    def _tell(self, work: _Work, began: float, done: Future[Any]) -> None:
        """In the thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._end, work, done, self._clock() - began)

    def _end(self, work: _Work, done: Future[Any], seconds: float) -> None:
        self._free += 1
        self._free_for_large += work.large
        self._running -= Counter({work.tenant: int(not work.large)})
        (self._large if work.large else self._small).charge(work.tenant, seconds)
        if not work.result.done():
            if done.cancelled():
                work.result.cancel()
            elif (error := done.exception()) is not None:
                work.result.set_exception(error)
            else:
                work.result.set_result(done.result())
        self._start()
