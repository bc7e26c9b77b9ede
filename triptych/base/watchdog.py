"""The watchdog of a worker process: it ends the process when an engine dies or stands still.

A supervisor or a kubelet starts the process anew, and the proxies resume its requests elsewhere. Nothing is
sent for them: a proxy has to see a lost worker, not an answer.
"""

from __future__ import annotations

import faulthandler
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence

from triptych.base.engine_beat import EngineBeat, Life, StallClock, judge
from triptych.base.errors import ConfigError

logger = logging.getLogger(__name__)

#: The exit code of a process whose engine has died or stood still.
ENGINE_EXIT = 70
#: The timer against hangs that hold the interpreter's lock goes by the clock, on which a process that was
#: stopped from outside, or frozen, hangs too: it has longer.
HANG_FACTOR = 2.0
#: Engines sleep for up to a second, and health follows at half of the limit.
LEAST_LIMIT = 4.0
_LONGEST_INTERVAL = 1.0


def check_stall_timeout(seconds: float) -> None:
    """ConfigError for a limit that an engine at rest would pass."""
    if seconds and not LEAST_LIMIT <= seconds < math.inf:
        raise ConfigError(
            f"--stall-timeout {seconds:g} must be {LEAST_LIMIT:g} seconds or more, or 0 for no limit"
        )


class HangTimer:
    """Faulthandler's timer, which needs no interpreter: it dumps all stacks and ends the process (code 1)."""

    def wind_up(self, seconds: float) -> None:
        """Starts the timer anew: it goes off `seconds` from now."""
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
        self._clocks = [StallClock(self.interval) for _ in self._beats]
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
