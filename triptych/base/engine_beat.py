"""The heartbeat of an engine's thread, and the watchdog that ends a process whose engine stands still."""

from __future__ import annotations

import asyncio
import enum
import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from triptych.base.errors import ConfigError

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
        #: When it last grew, on the monotonic clock.
        self.ticked_at = time.monotonic()
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
        self.ticked_at = time.monotonic()

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


#: Times that a watch may start again between two signs of life.
MOST_RESTARTS = 2


class OwnPauses:
    """The pauses of a watch itself, which judges nobody by what it has not seen.

    After one of a quarter of its `limit` it starts again; at most twice between two signs of life, so that
    what is dead is found by a watch that is always late, too.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._restarts = 0

    def restarts(self, late: float) -> bool:
        """Whether the watch starts again after a look that came `late` seconds late."""
        if late < self.limit / 4 or self._restarts >= MOST_RESTARTS:
            return False
        self._restarts += 1
        return True

    def alive(self) -> None:
        """What is watched has given a sign of life."""
        self._restarts = 0

    async def answers(self, asked: Collection[asyncio.Future[Any]], timeout: float) -> bool:
        """Whether all of them are done within `timeout` seconds, in which this event loop has turned."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        deadline = now + timeout
        while True:
            piece, began = min(deadline - now, self.limit / 4), now
            _, waiting = await asyncio.wait(asked, timeout=piece)
            if not waiting:
                self.alive()
                return True
            now = loop.time()
            if self.restarts(now - began - piece):
                deadline = now + timeout
            elif now >= deadline:
                return False


class StallClock:
    """The seconds for which a count has stood still, summed over looks `interval` seconds apart.

    A look that comes late starts again, as far as `OwnPauses` lets it, and else adds two intervals at most:
    where this thread was stopped or starved, so may the engine's have been.
    """

    def __init__(self, interval: float, limit: float) -> None:
        self._interval = interval
        self._pauses = OwnPauses(limit)
        self._count: int | None = None
        self._at = 0.0
        self.still = 0.0

    def poll(self, count: int, now: float) -> float:
        """`still` after a look at `now` that finds `count`."""
        if count != self._count:
            self._count, self.still = count, 0.0
            self._pauses.alive()
        elif self._pauses.restarts(now - self._at - self._interval):
            self.still = 0.0
        else:
            self.still += min(now - self._at, 2 * self._interval)
        self._at = now
        return self.still


#: The exit code of a process whose engine has died or stood still.
ENGINE_EXIT = 70
#: The timer against hangs that hold the interpreter's lock goes by the clock, on which a process that was
#: stopped from outside, or frozen, hangs too: it has longer.
HANG_FACTOR = 2.0
#: Engines sleep for up to a second, and health follows at half of the limit.
MIN_LIMIT = 4.0
_LONGEST_INTERVAL = 1.0


def check_stall_timeout(seconds: float) -> None:
    """ConfigError for a limit that an engine at rest would pass."""
    if seconds and not MIN_LIMIT <= seconds < math.inf:
        raise ConfigError(
            f"--stall-timeout {seconds:g} must be {MIN_LIMIT:g} seconds or more, or 0 for no limit"
        )


class HangTimer:
    """Faulthandler's timer, which needs no interpreter: it dumps all stacks and ends the process (code 1)."""

    def wind_up(self, seconds: float) -> None:
        """Restarts the timer: it expires in `seconds`."""
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()


class Watchdog:
    """A thread that checks all engines of a process and ends the process with the first that fails.

    While all are healthy it winds up `timer` again and again: a hang that holds the interpreter's lock stops
    this thread too, and then the timer goes off. A `limit` of 0 lets engines stand still for ever; a dead one
    ends the process all the same.
    """

    def __init__(
        self,
        beats: Sequence[EngineBeat],
        limit: float,
        *,
        end: Callable[[str], None] | None = None,
        timer: HangTimer | None = None,
    ) -> None:
        check_stall_timeout(limit)
        self._beats = tuple(beats)
        self._limit = limit or math.inf
        self._end = end or end_process
        self._timer = timer or HangTimer()
        self.interval = min(_LONGEST_INTERVAL, self._limit / 8)
        self._clocks = [StallClock(self.interval, self._limit) for _ in self._beats]
        self._healthy = True
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        for beat in self._beats:
            beat.on_death(self._wake.set)

    @property
    def healthy(self) -> bool:
        """Whether all engines were fresh at the last check."""
        return self._healthy and not any(beat.dead for beat in self._beats)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and the timer."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    def poll(self, now: float) -> str:
        """Why the process has to end; empty while it need not."""
        healthy, reason = True, ""
        for beat, clock in zip(self._beats, self._clocks, strict=True):
            still = clock.poll(beat.count, now)
            if beat.stopped:
                continue
            life = judge(still, self._limit * beat.patience, dead=beat.dead)
            healthy &= life is Life.FRESH
            if life is Life.STALE and self._healthy:
                logger.warning("the %s has stood still for %.0f s: it gets no new requests", beat.name, still)
            elif life is Life.STALLED:
                reason = reason or f"the {beat.name} has stood still for {still:.0f} s"
            elif life is Life.DEAD:
                reason = reason or f"the {beat.name} is dead"
        self._healthy = healthy
        return reason

    def _run(self) -> None:
        try:
            while not self._stopping:
                if reason := self.poll(time.monotonic()):
                    self._end(reason)
                    return
                if self._limit < math.inf:
                    longest = max(self._limit * beat.patience for beat in self._beats)
                    self._timer.wind_up(HANG_FACTOR * longest)
                self._wake.wait(self.interval)
        finally:
            # Not where the process was to end: should that hang too, the timer ends it.
            if self._stopping:
                self._timer.stop()


def end_process(reason: str) -> None:
    """Ends the process at once, without any clean-up, and prints the stacks of all its threads."""
    logger.critical("%s: this process ends, its requests go on elsewhere", reason)
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
    os._exit(ENGINE_EXIT)
