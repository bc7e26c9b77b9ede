"""Host memory for media that are received and not yet preprocessed."""

from __future__ import annotations

import asyncio
from collections import deque


class MediaBudget:
    """At most `limit` bytes, or one item alone that is larger. Who finds no room waits, in order of arrival.

    What holds room needs nothing but the media threads to give it back, so that every turn comes.
    """

    def __init__(self, limit: int) -> None:
        self.nbytes = 0
        self._limit = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, nbytes: int, *, first: bool = False) -> MediaRoom:
        """Room for one item, before its first frame is read; `first` goes before all that wait."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (nbytes, turn)
        if first:
            self._waiting.appendleft(entry)
        else:
            self._waiting.append(entry)
        self._next_turns()
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._give_back(nbytes)
            else:
                self._waiting.remove(entry)
                self._next_turns()
            raise
        return MediaRoom(self, nbytes)

    def _next_turns(self) -> None:
        while self._waiting:
            nbytes, turn = self._waiting[0]
            if self.nbytes and self.nbytes + nbytes > self._limit:
                return
            if turn.done():
                return  # cancelled: it leaves the queue when it runs, and looks again
            self._waiting.popleft()
            self.nbytes += nbytes
            turn.set_result(None)

    def _give_back(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self._next_turns()


class MediaRoom:
    """What one item holds of the budget, until `release`."""

    def __init__(self, budget: MediaBudget, nbytes: int) -> None:
        self._budget = budget
        self._nbytes = nbytes

    def release(self) -> None:
        """Gives all of it back. Idempotent."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._budget._give_back(nbytes)
