"""An event loop in a thread of its own, beside an engine's."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_JOIN_SECONDS = 10.0


class LoopThread:
    """A loop in a daemon thread, which `stop` ends; or the `loop` given."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        if loop is None:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self._end_tasks())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def submit(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Runs `work` in the loop; from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def stop(self, last: Coroutine[object, object, None]) -> None:
        """Runs `last`, then ends the thread. A loop that was given is left running, and not waited for."""
        done = self.submit(last)
        if self._thread is None:
            return
        try:
            done.result(_JOIN_SECONDS)
        except TimeoutError:
            logger.warning("transfers did not end in %g s", _JOIN_SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_JOIN_SECONDS)
