"""How workers of one machine give way to each other: a shared page with the threads that compute right now.

One byte for each worker, the most important first. Two ways of using it:

An encoder may look at the bytes before its own between two layers of the tower (`give_way`), and wait while
their threads and its own would be more than there are cores; never for long, so that decoding slows the
tower down and does not stop it.

A PD worker may keep the begins of its steps apart (`rest`) while all together want more cores than there
are. A step costs nearly the same for one sequence as for several: fewer steps with more sequences in each
leave the towers the cores that many small steps would take. Who gains are the requests that wait for a tower,
who loses are the streams: the fewer wait for each stream, the shorter the rest.

While no other worker computes, a PD worker that computes on one thread keeps all its threads on one core
(`OwnCore`): they take turns by the interpreter's lock, and elsewhere each would first have to wake up.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from types import TracebackType

from triptych.cpu.cpus import OwnCore
from triptych.errors import ConfigError
from triptych.machine.resources import usable_cpus

#: Workers of one machine, at most.
SLOTS = 256
#: Seconds between two looks of one that waits: short against a decode step, long against the look.
_LOOK_SECONDS = 0.0005


def fits(ahead: bytes, own: int, cores: int) -> bool:
    """Whether `own` threads may run beside those of `ahead`. Beside nobody they always may."""
    busy = sum(ahead)
    return busy == 0 or busy + own <= cores


def crowded(others: bytes, own: int, cores: int) -> bool:
    """Whether `own` threads and those of `others` are more than the cores."""
    return sum(others) + own > cores


class CorePage:
    """One worker's view; `with page:` says that its `threads` compute. ConfigError for no file."""

    def __init__(
        self,
        path: str,
        slot: int,
        threads: int,
        *,
        patience: float = 0.0,
        interval: float = 0.0,
        core: OwnCore | None = None,
    ) -> None:
        """Seconds: `patience` is what one `give_way` lasts at most, `interval` what `rest` keeps apart.

        The process keeps to `core` from a `rest` that finds no other worker computing until one that does.
        """
        if not 0 <= slot < SLOTS:
            raise ConfigError(f"--core-slot {slot}: give a number from 0 to {SLOTS - 1}")
        self._slot, self._threads = slot, min(threads, 255)
        self._patience, self._interval = patience, interval
        self._core = core
        self._begun = -math.inf
        self._cores = usable_cpus()
        try:
            self._page = _opened(path)
        except OSError as error:
            raise ConfigError(f"--core-page {path} cannot be used ({error.strerror}): give a file") from error
        # What a worker that was killed in a step has left.
        self._page[slot] = 0

    def __enter__(self) -> None:
        self._page[self._slot] = self._threads

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._page[self._slot] = 0

    def give_way(self) -> float:
        """Waits while more important workers need the cores; the seconds it took."""
        if self._may_run():
            return 0.0
        start = time.monotonic()
        self._page[self._slot] = 0
        while time.monotonic() - start < self._patience and not self._may_run():
            time.sleep(_LOOK_SECONDS)
        self._page[self._slot] = self._threads
        return time.monotonic() - start

    def rest(self, share: float = 1.0) -> float:
        """Before a step: waits while others lack cores and the last step began too lately; the seconds.

        `share` of the interval, up to 1, is kept: how much there is to win by waiting. While others compute,
        the process may run on all cores: a tower that comes to its own one would take half of it.
        """
        start = now = time.monotonic()
        interval = self._interval * min(share, 1.0)
        while now < self._begun + interval and self._crowded():
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
        self._begun = now
        if self._core is not None:
            if any(self._others()):
                self._core.let_go()
            else:
                self._core.keep()
        return now - start

    def _crowded(self) -> bool:
        return crowded(self._others(), self._threads, self._cores)

    def _others(self) -> bytes:
        return self._page[: self._slot] + self._page[self._slot + 1 :]

    def _may_run(self) -> bool:
        return fits(self._page[: self._slot], self._threads, self._cores)


def _opened(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, SLOTS)
        return mmap.mmap(descriptor, SLOTS)
    finally:
        os.close(descriptor)
