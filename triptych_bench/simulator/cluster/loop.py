"""An asyncio event loop in virtual time: when nothing is ready, its time jumps to the next timer.

The proxy's own classes run on it as they are: tasks, futures, sleeps and timeouts work, sockets and threads
do not.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import signal
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from threading import current_thread, main_thread
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")
Call = Callable[..., object]


class FifoLock:
    """A lock for what serves one user at a time, a worker's device; granted in the order of asking."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._held = False

    def acquire(self, granted: Callable[[], None]) -> None:
        """Calls `granted` now if the lock is free, else after the users that wait already."""
        if self._held:
            self._waiting.append(granted)
        else:
            self._held = True
            granted()

    def release(self) -> None:
        assert self._held, "the lock is free"
        self._held = bool(self._waiting)
        if self._waiting:
            self._waiting.popleft()()


class VirtualTimer(msgspec.Struct, eq=False):
    """A call to come. Cheaper than asyncio's own handle, which copies a context for every call."""

    call: Call | None
    arguments: tuple[object, ...]
    context: Context | None

    def cancel(self) -> None:
        self.call = None
        self.arguments = ()


class VirtualLoop:
    """Calls come in the order of their moments, equal moments in the order of asking.

    It has the part of `asyncio.AbstractEventLoop` that tasks, futures and timers use.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._ready: deque[VirtualTimer] = deque()
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        self._order = itertools.count()
        self._stopping = False
        self._failure: BaseException | None = None

    def time(self) -> float:
        return self.now

    def get_debug(self) -> bool:
        return False

    def call_soon(self, call: Call, *arguments: object, context: Context | None = None) -> VirtualTimer:
        timer = VirtualTimer(call, arguments, context)
        self._ready.append(timer)
        return timer

    def call_at(
        self, when: float, call: Call, *arguments: object, context: Context | None = None
    ) -> VirtualTimer:
        """At `when`, or now if that has passed."""
        timer = VirtualTimer(call, arguments, context)
        heapq.heappush(self._timers, (when if when > self.now else self.now, next(self._order), timer))
        return timer

    def call_later(
        self, delay: float, call: Call, *arguments: object, context: Context | None = None
    ) -> VirtualTimer:
        timer = VirtualTimer(call, arguments, context)
        heapq.heappush(self._timers, (self.now + delay, next(self._order), timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._asyncio)

    def create_task(
        self, work: Coroutine[Any, Any, T], *, name: object = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        return asyncio.Task(work, loop=self._asyncio, context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An error that no task has handled: `run` raises it."""
        self._failure = context.get("exception") or RuntimeError(context["message"])

    def call(self, function: Callable[[], T]) -> T:
        """The function's result, with this loop as the running one: for what starts tasks as it is made."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self._asyncio)
        try:
            return function()
        finally:
            asyncio._set_running_loop(outer)

    def run(self) -> None:
        """Until nothing is left to happen, or until what is ready is done after a call of `stop`.

        Ctrl-C comes before the next call: in the callback of a weak reference, of which each task has one,
        Python drops what is raised, and the run would go on.
        """
        default = signal.default_int_handler
        ours = current_thread() is main_thread() and signal.getsignal(signal.SIGINT) is default
        if ours:
            end = VirtualTimer(default, (signal.SIGINT, None), None)
            signal.signal(signal.SIGINT, lambda *_: self._ready.appendleft(end))
        try:
            self.call(self._run)
        finally:
            self._stopping = False
            if ours:
                signal.signal(signal.SIGINT, default)

    def stop(self) -> None:
        """Time does not go on: the run ends, or the next one when none is under way."""
        self._stopping = True

    def _run(self) -> None:
        ready, timers = self._ready, self._timers
        while True:
            if ready:
                timer = ready.popleft()
                if timer.call is None:
                    continue
            else:
                if self._failure is not None:
                    raise self._failure
                if self._stopping or not timers:
                    return
                moment, _, timer = heapq.heappop(timers)
                if timer.call is None:
                    continue
                self.now = moment
            if timer.context is None:
                timer.call(*timer.arguments)
            else:
                timer.context.run(timer.call, *timer.arguments)
            del timer  # a task that has failed reports it when it is gone

    @property
    def _asyncio(self) -> asyncio.AbstractEventLoop:
        return cast(asyncio.AbstractEventLoop, self)
