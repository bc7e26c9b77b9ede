"""The output of one request between the dispatcher and the client's connection."""

from __future__ import annotations

import asyncio

from triptych.errors import RequestError
from triptych.proxy.call.chat import Output


class Outbox:
    """Unbounded by itself: a request puts out at most max_tokens. One reader."""

    __slots__ = ("_error", "_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[Output] = []
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def empty(self) -> bool:
        return not self._items

    def put(self, output: Output) -> None:
        self._items.append(output)
        if self._waiter is not None:
            self._wake()

    def fail(self, error: RequestError) -> None:
        """`take` raises this once everything before it has been taken."""
        self._error = error
        self._wake()

    async def take(self) -> list[Output]:
        """All that has come since the last call; waits for at least one."""
        while not self._items:
            if self._error is not None:
                error, self._error = self._error, None
                try:
                    raise error
                finally:
                    del error  # its traceback holds this frame: a cycle would keep the request's body
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
