"""Virtual time: calls come in the order of their moments, and equal moments in the order of asking."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Timer:
    """One call to come."""

    __slots__ = ("arguments", "call")

    def __init__(self, call: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.call: Callable[..., None] | None = call
        self.arguments = arguments

    def cancel(self) -> None:
        """It will not happen. Idempotent."""
        self.call = None
        self.arguments = ()


class Clock:
    """`now` in seconds; it moves only in `run`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def at(self, moment: float, call: Callable[..., None], *arguments: Any) -> Timer:
        """Calls at `moment`, or now if that has passed."""
        timer = Timer(call, arguments)
        heapq.heappush(self._heap, (max(moment, self.now), next(self._order), timer))
        return timer

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> Timer:
        return self.at(self.now + seconds, call, *arguments)

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is left to happen, or `until` says so; it is asked after every call."""
        heap = self._heap
        while heap:
            moment, _, timer = heapq.heappop(heap)
            if timer.call is None:
                continue
            self.now = moment
            timer.call(*timer.arguments)
            if until():
                return
