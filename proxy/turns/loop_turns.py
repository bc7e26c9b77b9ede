"""LoopTurns: what waits for the event loop on behalf of clients, a few steps in each of the loop's turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial

from triptych.base.least_service import RecentHolders

#: In each turn of the loop: a step and the task that it starts hold it for up to half a millisecond.
STEPS = 2
#: Beyond those, until nothing waits again, where one holder alone has asked lately: clients that ask at one
#: moment are served together. A turn of the loop for every two of them takes a quarter more of a small
#: request's CPU. Beside others a crowd of one holder would hold the loop for as many steps at each moment.
BURST = 64


class LoopTurns:
    """Steps of work for clients, a holder after the other: an address, or a key once it is known.

    Else whoever has a thousand connections with something to say is served a thousand times before whoever
    comes later with one, however cheap each time is.
    """

    def __init__(self, steps: int = STEPS, burst: int = BURST) -> None:
        self._steps = steps
        self._burst = self._credit = burst
        self._recent = RecentHolders()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        #: Steps of the present turn of the loop.
        self._taken = 0
        self._announced = False

    def ask(self, holder: str, step: Callable[[], None]) -> None:
        """Calls it now, or when others have had their turns."""
        self._recent.note(holder)
        if self._waiting or not self._may_take():
            self._waiting.setdefault(holder, deque()).append(step)
            return
        self._announce()
        step()

    async def turn(self, holder: str) -> None:
        """Returns at once, or when others have had their turns."""
        self._recent.note(holder)
        if not self._waiting and self._may_take():
            self._announce()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ask(holder, partial(_give, turn))
        if not turn.done():
            await turn

    def _may_take(self) -> bool:
        """Whether the present turn has a step left; it is taken."""
        if self._taken < self._steps:
            self._taken += 1
        elif self._credit and not self._recent.several:
            self._credit -= 1
        else:
            return False
        return True

    def _announce(self) -> None:
        if not self._announced:
            self._announced = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._taken, self._announced = 0, False
        if self._waiting:
            self._announce()
        else:
            self._credit = self._burst
        while self._waiting and self._may_take():
            holder = next(iter(self._waiting))
            steps = self._waiting.pop(holder)
            step = steps.popleft()
            if steps:
                self._waiting[holder] = steps  # behind all others
            step()


def _give(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
