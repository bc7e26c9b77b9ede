"""The embedding store for engine threads: transfers run in an event loop of another thread."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from triptych.ec_connector.connectors.loop_thread import LoopThread
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore

P = ParamSpec("P")
T = TypeVar("T")


class StoreClient:
    """An event loop for transfers, and the store in it, which is connected at the first transfer.

    The loop runs in a thread of its own, or is the `loop` given.
    """

    def __init__(self, url: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.closed = False
        self._url = url
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
                self._store = await EmbeddingStore.connect(self._url)
            return self._store

    def close(self) -> None:
        """Disconnects, and ends the loop unless it was given."""
        self._thread.stop(self._disconnect())

    async def _disconnect(self) -> None:
        async with self._connecting:
            if self._store is not None:
                await self._store.close()
