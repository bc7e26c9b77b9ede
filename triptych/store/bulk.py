"""Bulk transfers: their errors, buffers and connection pool, separate from redis-py's."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import Generic, Protocol, TypeVar


class ScatterBuffer:
    """A writable buffer over all `pieces`, in their order, filled from front to back.

    The head of a stored value is not part of the tensor, and memory of a pool may be in several pieces.
    """

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self.pieces = [piece for piece in pieces if len(piece)]
        self._starts = [0, *accumulate(len(piece) for piece in self.pieces)]

    def __len__(self) -> int:
        return self._starts[-1]

    def rest(self, start: int) -> memoryview:
        """From byte `start`, which is inside, to the end of its piece."""
        index = bisect_right(self._starts, start) - 1
        return self.pieces[index][start - self._starts[index] :]

    def between(self, start: int, stop: int) -> Iterator[memoryview]:
        """Bytes [start, stop), in pieces."""
        while start < min(stop, len(self)):
            piece = self.rest(start)[: stop - start]
            yield piece
            start += len(piece)

    def write(self, start: int, data: bytes) -> None:
        """Copies `data` to byte `start` and on; it must fit."""
        for piece in self.between(start, start + len(data)):
            piece[:] = data[: len(piece)]
            data = data[len(piece) :]

    def read(self, start: int, stop: int) -> bytes:
        """A copy of bytes [start, stop)."""
        return b"".join(self.between(start, stop))


#: Memory that a value is received into.
Received = memoryview | ScatterBuffer


def scattered(memory: Received) -> ScatterBuffer:
    """The memory as pieces, whichever it is."""
    return memory if isinstance(memory, ScatterBuffer) else ScatterBuffer([memory])


_NOT_SERVING = ("CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY", "TRYAGAIN")
#: Characters of an error reply that are repeated.
_SHOWN = 80
#: Bytes per second below which a transfer counts as stalled.
SLOWEST = 20e6
#: Seconds after which a connection is not used again: the server's name may be another host's by then, while
#: the one before goes on answering reads as a replica.
MAX_AGE = 60.0


class BulkError(Exception):
    """The transfer failed and its connection is closed."""


class BulkLost(BulkError):
    """The connection broke. `untouched`: before the first byte of the reply."""

    def __init__(self, message: str, *, untouched: bool) -> None:
        super().__init__(message)
        self.untouched = untouched


class BulkRefused(BulkError):
    """The server answered with an error or a redirect."""


class BulkRedirected(BulkRefused):
    """Another server of the cluster has the key's slot: MOVED, or ASK, which is for this command alone."""

    def __init__(self, slot: int, host: str, port: int, *, ask: bool) -> None:
        super().__init__(f"the slot {slot} is at {host}:{port}")
        self.slot, self.host, self.port, self.ask = slot, host, port, ask


class BulkNotServing(BulkRefused):
    """The server cannot answer for now: it is loading, or has lost its role or slots. A retry may succeed."""


def refusal(line: bytes) -> BulkRefused:
    """The error for the line of an error reply, without its first character."""
    text = line.decode(errors="replace")
    kind, _, rest = text.partition(" ")
    slot, _, place = rest.partition(" ")
    host, _, port = place.rpartition(":")
    if kind in ("MOVED", "ASK") and slot.isdecimal() and port.isdecimal():
        return BulkRedirected(int(slot), host, int(port), ask=kind == "ASK")
    if kind in _NOT_SERVING:
        return BulkNotServing(f"the store answered {text[:_SHOWN]}")
    return BulkRefused(f"the store answered {text[:_SHOWN]}")


class ValueTooLarge(BulkError):
    """The value is larger than expected."""


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
