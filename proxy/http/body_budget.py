"""Memory for the bodies of all requests in flight, over HTTP and gRPC together."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from triptych.config import MIB
from triptych.errors import Overloaded

RETRY_AFTER = 2.0
#: Seconds that a gRPC call waits until its message may be received.
WAIT_SECONDS = 10.0
_FULL = "the bodies of the requests in flight fill the room for them (--body-memory)"


class BodyBudget:
    """Bytes of request bodies held, at most `limit`.

    How large a gRPC message is shows only when all of it is there. So a call that receives one reserves
    the largest possible, `message_bytes`, and keeps what the message turns out to take. These reservations
    hold at most half of the limit, and those of one principal at most half of that: calls whose messages
    never come keep out neither HTTP nor other principals. Further calls wait for their turn.
    """

    def __init__(self, limit: int, message_bytes: int = 64 * MIB) -> None:
        self.nbytes = 0
        self.limit = limit
        self.message_bytes = min(message_bytes, limit)
        #: Messages that are received at once: of all principals, and of one.
        self.at_once = max(1, limit // 2 // self.message_bytes)
        self.of_one = max(1, self.at_once // 2)
        self._receiving: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    def add(self, nbytes: int) -> None:
        """Counts bytes that have arrived; Overloaded when there is no room for them."""
        if self.nbytes + nbytes > self.limit:
            raise Overloaded(_FULL, retry_after=RETRY_AFTER)
        self.nbytes += nbytes

    def remove(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self._next_turns()

    @asynccontextmanager
    async def message(self, principal: str = "") -> AsyncIterator[MessageRoom]:
        """Room for one message from before its first byte to the end of its call.

        `principal` is empty where no keys are in use. Overloaded when no turn comes in time.
        """
        await self._turn(principal)
        room = MessageRoom(self, principal)
        try:
            yield room
        finally:
            room.close()

    async def _turn(self, principal: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((principal, turn))
        self._next_turns()
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._end_receiving(principal, self.message_bytes)
            else:
                self._waiting.remove((principal, turn))
            if isinstance(error, TimeoutError):
                raise Overloaded(_FULL, retry_after=RETRY_AFTER) from None
            raise

    def _next_turns(self) -> None:
        """Gives turns in order of arrival; a body that waits for others of its principal is overtaken."""
        for principal, turn in list(self._waiting):
            full = self.nbytes + self.message_bytes > self.limit
            if full or self._receiving.total() >= self.at_once:
                return
            if turn.done() or (principal and self._receiving[principal] >= self.of_one):
                continue
            self._waiting.remove((principal, turn))
            self._receiving[principal] += 1
            self.nbytes += self.message_bytes
            turn.set_result(None)

    def _end_receiving(self, principal: str, unused: int) -> None:
        self._receiving[principal] -= 1
        if not self._receiving[principal]:
            del self._receiving[principal]
        self.remove(unused)


class MessageRoom:
    """What one gRPC call holds of the budget."""

    def __init__(self, budget: BodyBudget, principal: str) -> None:
        self._budget = budget
        self._principal = principal
        self._held = budget.message_bytes
        self._receiving = True

    def received(self, nbytes: int) -> None:
        """The message is here and takes so many bytes: the rest of its reservation is given back."""
        unused, self._held, self._receiving = self._held - nbytes, nbytes, False
        self._budget._end_receiving(self._principal, unused)

    def close(self) -> None:
        """The call has ended."""
        if self._receiving:
            self.received(0)
            return
        self._budget.remove(self._held)
        self._held = 0
