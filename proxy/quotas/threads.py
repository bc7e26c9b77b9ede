"""QuotaThreads: threads whose places are a quota, so that no holder's work keeps all of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from triptych.proxy.quotas.quota import Quota

T = TypeVar("T")


class QuotaThreads:
    """As many threads as the quota has places. A place is taken until the work ends, awaited or not."""

    def __init__(self, quota: Quota, name: str) -> None:
        self._quota = quota
        self._executor = ThreadPoolExecutor(quota.spec.capacity, thread_name_prefix=name)

    async def run(self, holder: str, work: Callable[[], T], ended: Callable[[], None] = lambda: None) -> T:
        """The result of `work`; `ended` is called when it will not run any more. QuotaExceeded: no turn."""
        loop = asyncio.get_running_loop()
        try:
            hold = await self._quota.wait(holder, 1)
        except BaseException:
            ended()
            raise

        def end(future: Future[T] | None = None) -> None:
            ended()
            with contextlib.suppress(RuntimeError):  # the end of the event loop
                loop.call_soon_threadsafe(hold.close)

        try:
            future = self._executor.submit(work)
        except BaseException:
            end()
            raise
        future.add_done_callback(end)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
