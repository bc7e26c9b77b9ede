"""How workers of one machine give way to each other: a shared page with the threads that compute right now.

One byte for each worker, the most important first. PD workers only write theirs. An encoder looks at those
before its own between two layers of the tower, and waits while their threads and its own would be more than
there are cores; never for long, so that decoding slows the tower down and does not stop it.
"""

from __future__ import annotations

import mmap
import os
import time
from types import TracebackType

from triptych.errors import ConfigError

#: Workers of one machine, at most.
SLOTS = 256
#: Seconds between two looks of one that waits: short against a decode step, long against the look.
_LOOK_SECONDS = 0.0005


def fits(ahead: bytes, own: int, cores: int) -> bool:
    """Whether `own` threads may run beside those of `ahead`. Beside nobody they always may."""
    busy = sum(ahead)
    return busy == 0 or busy + own <= cores


class CorePage:
    """One worker's view; `with page:` says that its `threads` compute. ConfigError for no file."""

    def __init__(self, path: str, slot: int, threads: int, patience: float = 0.0) -> None:
        """`patience`: seconds that one `give_way` lasts at most."""
        if not 0 <= slot < SLOTS:
            raise ConfigError(f"--core-slot {slot}: give a number from 0 to {SLOTS - 1}")
        self._slot, self._threads, self._patience = slot, min(threads, 255), patience
        self._cores = len(os.sched_getaffinity(0))
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

    def _may_run(self) -> bool:
        return fits(self._page[: self._slot], self._threads, self._cores)


def _opened(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, SLOTS)
        return mmap.mmap(descriptor, SLOTS)
    finally:
        os.close(descriptor)
