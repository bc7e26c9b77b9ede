"""Pool of bulk connections to one server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from triptych.store.bulk import SLOWEST, BulkLost

#: Seconds after which a connection is not used again: the server's name may be another host's by then, while
#: the one before goes on answering reads as a replica.
MAX_AGE = 60.0


class BulkConnection(Protocol):
    """A connection in a `BulkPool`."""

    @property
    def usable(self) -> bool: ...

    def close(self) -> None: ...


T = TypeVar("T")


C = TypeVar("C", bound=BulkConnection)


class BulkPool(Generic[C]):
    """A pool with at most `size` connections in use; idle ones are reused, failed ones never."""

    def __init__(self, make: Callable[[], Awaitable[C]], size: int, timeout: float) -> None:
        self._make = make
        self._timeout = timeout
        #: One for each connection in use; waiting for one is not part of a transfer's deadline.
        self._slots = asyncio.Semaphore(size)
        #: Connections and when each was opened.
        self._idle: list[tuple[C, float]] = []
        self._closed = False

    async def transfer(self, nbytes: int, exchange: Callable[[C], Awaitable[T]]) -> T:
        """One exchange of up to `nbytes` within a deadline; retried once if an idle connection was closed.

        BulkError, OSError or TimeoutError when it fails.
        """
        async with self._slots, asyncio.timeout(self._timeout + nbytes / SLOWEST):
            try:
                async with self._connection() as connection:
                    return await exchange(connection)
            except BulkLost as error:
                if not error.untouched:
                    raise
            async with self._connection(fresh=True) as connection:
                return await exchange(connection)

    @asynccontextmanager
    async def _connection(self, *, fresh: bool = False) -> AsyncIterator[C]:
        """A connection for one exchange; any exception inside closes it."""
        connection, opened = (None if fresh else self._pop_idle()) or (await self._make(), time.monotonic())
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        if connection.usable and not self._closed:
            self._idle.append((connection, opened))
        else:
            connection.close()

    def _pop_idle(self) -> tuple[C, float] | None:
        while self._idle:
            connection, opened = self._idle.pop()
            if connection.usable and time.monotonic() - opened < MAX_AGE:
                return connection, opened
            connection.close()
        return None

    def close(self) -> None:
        """Closes the idle connections now, and those in use after their exchange."""
        self._closed = True
        self.drop_idle()

    def drop_idle(self) -> None:
        """Closes the idle connections: the next transfers open others."""
        while self._idle:
            self._idle.pop()[0].close()
