"""The store's client in an event loop of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from triptych.store import keys
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

logger = logging.getLogger(__name__)


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
            self.loop.run_until_complete(self.end_tasks())
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    @property
    def own(self) -> bool:
        """Whether the loop is this thread's, and ends with it."""
        return self._thread is not None

    async def end_tasks(self) -> None:
        """Cancels all else that runs in the loop, and waits for its end."""
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


P = ParamSpec("P")


T = TypeVar("T")


class StoreClient:
    """An event loop for transfers, and the store in it, which is connected at the first transfer.

    The loop runs in a thread of its own, or is the `loop` given. `kind` is the store's.
    """

    def __init__(
        self, url: str, loop: asyncio.AbstractEventLoop | None = None, kind: str = keys.EMBEDDING
    ) -> None:
        self.closed = False
        self._url = url
        self._kind = kind
        self._store: EmbeddingStore | None = None
        self._connecting = asyncio.Lock()
        self._thread = LoopThread("ec-transfers", loop)

    def submit(self, transfer: Coroutine[object, object, T]) -> Future[T]:
        """Starts a transfer in the loop; StoreUnavailable once the client is closed."""
        if self.closed:
            transfer.close()
            raise StoreUnavailable("the connector is shut down")
        return asyncio.run_coroutine_threadsafe(transfer, self._thread.loop)

    def call_soon(self, callback: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Calls back in the loop. RuntimeError when that has ended."""
        self._thread.loop.call_soon_threadsafe(functools.partial(callback, *args, **kwargs))

    async def store(self) -> EmbeddingStore:
        """The connected store; StoreUnavailable when it does not answer."""
        async with self._connecting:
            if self._store is None:
                self._store = await EmbeddingStore.connect(self._url, kind=self._kind)
            return self._store

    def close(self, first: Callable[[], Coroutine[object, object, None]] | None = None) -> None:
        """Runs `first`, disconnects, and ends the loop unless it was given."""
        self._thread.stop(self._disconnect(first))

    async def _disconnect(self, first: Callable[[], Coroutine[object, object, None]] | None) -> None:
        if first is not None:
            await first()
        if self._thread.own:
            # A transfer that goes on after the store is closed connects anew, and nobody closes that.
            await self._thread.end_tasks()
        async with self._connecting:
            if self._store is not None:
                await self._store.close()
