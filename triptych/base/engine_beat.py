"""The heartbeat of an engine's thread, how long it may stand still, and how busy it is."""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

logger = logging.getLogger(__name__)

#: How much longer than others a step may take that compiles, or that waits for another engine.
SLOW_FACTOR = 10.0


#: Seconds of which the busy share is reported.
BUSY_SECONDS = 10.0
#: Readings closer together than this share one sample.
_SAMPLE_SECONDS = 0.25


class BusyClock:
    """The time in which one thread works. Any thread may read its `share`. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Seconds of work that is over, and when the present work began: one tuple, so that they fit.
        self._state: tuple[float, float | None] = 0.0, None
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, float]] = deque([(clock(), 0.0)])

    def mark(self, working: bool) -> None:
        """The thread works from now on, or no longer."""
        (total, since), now = self._state, self._clock()
        self._state = total + (0.0 if since is None else now - since), now if working else None

    @contextmanager
    def working(self, working: bool) -> Iterator[None]:
        """A context that is work, or a wait inside work."""
        before = self._state[1] is not None
        self.mark(working)
        try:
            yield
        finally:
            self.mark(before)

    def share(self) -> float:
        """The share of work in the last `BUSY_SECONDS`, or since a last reading before that; 0 to 1."""
        with self._lock:
            (total, since), now, samples = self._state, self._clock(), self._samples
            total += 0.0 if since is None else now - since
            while len(samples) > 1 and samples[1][0] <= now - BUSY_SECONDS:
                samples.popleft()
            at, before = samples[0]
            if now - samples[-1][0] >= _SAMPLE_SECONDS:
                samples.append((now, total))
            return min(max((total - before) / (now - at), 0.0), 1.0) if now > at else 0.0


class EngineBeat:
    """The heartbeat of an engine's thread: a count that it increases once per step, layer or sleep."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        #: The engine's work, as opposed to its waits.
        self.busy = BusyClock()
        #: How many reasons there are for the thread to stand still longer than usual.
        self._slow = 0
        self._stopped = False
        self._ended = False
        self._death_listeners: list[Callable[[], None]] = []

    @property
    def dead(self) -> bool:
        """Whether the thread has ended without `stop`."""
        return self._ended and not self._stopped

    @property
    def stopped(self) -> bool:
        """Whether the thread may end: its progress does not count any more."""
        return self._stopped

    def on_death(self, listener: Callable[[], None]) -> None:
        """Calls `listener` in the engine's thread when that ends without `stop`."""
        self._death_listeners.append(listener)

    def tick(self) -> None:
        """The engine has come one step, layer or sleep further."""
        self.count += 1

    def run(self, loop: Callable[[], None]) -> None:
        """Runs the engine's loop in the calling thread; an end before `stop` is its death."""
        self.tick()
        try:
            loop()
        except BaseException:
            # Not only Exception: panics of Rust extensions and SystemExit end a thread too.
            logger.critical("the %s has died", self.name, exc_info=True)
        self._ended = True
        if self.dead:
            for listener in self._death_listeners:
                listener()

    def stop(self) -> None:
        """From now on the thread may end."""
        self._stopped = True

    def begin_slow(self) -> None:
        """What follows may take long, until `end_slow`."""
        self._slow += 1

    def end_slow(self) -> None:
        self._slow -= 1
        self.tick()

    @contextmanager
    def slow(self) -> Iterator[None]:
        """A context for what may take long: a first step that compiles, or a wait for another engine."""
        self.begin_slow()
        try:
            yield
        finally:
            self.end_slow()

    @contextmanager
    def turn(self, turn: AbstractContextManager[object]) -> Iterator[None]:
        """Holds `turn`; the wait for it counts as slow, and not as work."""
        with ExitStack() as stack:
            with self.slow(), self.busy.working(False):
                stack.enter_context(turn)
            yield

    @property
    def patience(self) -> float:
        """By what factor the limit on standing still is multiplied now."""
        return SLOW_FACTOR if self._slow else 1.0


class Life(enum.Enum):
    """An engine's state: from `STALE` on its worker is not healthy, from `STALLED` on the process ends."""

    FRESH = enum.auto()
    STALE = enum.auto()
    STALLED = enum.auto()
    DEAD = enum.auto()


def judge(still: float, limit: float, *, dead: bool = False) -> Life:
    """The state of an engine that has made no progress for `still` seconds, where `limit` are allowed."""
    if dead:
        return Life.DEAD
    if still < limit / 2:
        return Life.FRESH
    return Life.STALE if still < limit else Life.STALLED


class StallClock:
    """The seconds for which a count has stood still, summed over looks `interval` seconds apart.

    A look that comes late adds two intervals at most: where this thread was stopped or starved, so may the
    engine's have been.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._count: int | None = None
        self._at = 0.0
        self.still = 0.0

    def poll(self, count: int, now: float) -> float:
        """`still` after a look at `now` that finds `count`."""
        if count != self._count:
            self._count, self.still = count, 0.0
        else:
            self.still += min(now - self._at, 2 * self._interval)
        self._at = now
        return self.still
