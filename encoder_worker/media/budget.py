"""Budget of host memory for media that are received and not yet preprocessed."""

from __future__ import annotations

import asyncio
from collections import deque


class MediaBudget:
    """A first-come-first-served semaphore over bytes: at most `limit`, or one item alone that is larger.

    An item with room needs only the media threads to release it, so every wait ends.
    """

    def __init__(self, limit: int) -> None:
        self.nbytes = 0
        self._limit = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, nbytes: int, *, first: bool = False) -> MediaRoom:
        """Room for one item, before its first frame is read; `first` queues it before all other waiters."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, granted)
        if first:
            self._waiting.appendleft(entry)
        else:
            self._waiting.append(entry)
        self._serve_waiting()
        try:
            await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                self.release(nbytes)
            else:
                self._waiting.remove(entry)
                self._serve_waiting()
            raise
        return MediaRoom(self, nbytes)

    def _serve_waiting(self) -> None:
        while self._waiting:
            nbytes, granted = self._waiting[0]
            if self.nbytes and self.nbytes + nbytes > self._limit:
                return
            if granted.done():
                return  # cancelled: it leaves the queue when its task runs, which serves the queue again
            self._waiting.popleft()
            self.nbytes += nbytes
            granted.set_result(None)

    def release(self, nbytes: int) -> None:
        """Returns bytes to the budget."""
        self.nbytes -= nbytes
        self._serve_waiting()


class MediaRoom:
    """One item's share of the budget, until `release`."""

    def __init__(self, budget: MediaBudget, nbytes: int) -> None:
        self._budget = budget
        self._nbytes = nbytes

    def release(self) -> None:
        """Returns all bytes to the budget. Idempotent."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._budget.release(nbytes)
