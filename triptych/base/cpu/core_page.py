"""Page of the machine's cores: which of them compute now."""

from __future__ import annotations

import mmap
import os

from triptych.base.cpu.threads import threads_beside
from triptych.base.errors import ConfigError
from triptych.base.machine.resources import usable_cpus

#: Workers of one machine, at most.
SLOTS = 256


def crowded(others: bytes, own: int, cores: int) -> bool:
    """Whether `own` threads and those of `others` are more than the cores."""
    return sum(others) + own > cores


class CorePage:
    """One worker's view of the page, a byte for each worker. ConfigError for a file that cannot be used."""

    def __init__(self, path: str, slot: int, threads: int, maximum: int = 0) -> None:
        """The worker computes on `threads`, or on up to `maximum` where other workers leave cores."""
        if not 0 <= slot < SLOTS:
            raise ConfigError(f"--core-slot {slot}: give a number from 0 to {SLOTS - 1}")
        self._slot = slot
        self._minimum, self._maximum = threads, max(threads, maximum)
        self._cores = usable_cpus()
        try:
            self._page = _open(path)
        except OSError as error:
            raise ConfigError(f"--core-page {path} cannot be used ({error.strerror}): give a file") from error
        # What a worker that was killed in a step has left.
        self._page[slot] = 0

    def begin(self, most: int | None = None) -> int:
        """How many threads suit this moment, up to `most`; other workers see them compute until `end`."""
        maximum = self._maximum if most is None else min(most, self._maximum)
        minimum = min(self._minimum, maximum)
        threads = threads_beside(sum(self._others()), minimum, maximum, self._cores)
        self._page[self._slot] = min(threads, 255)
        return threads

    def end(self) -> None:
        """Other workers see that this one does not compute."""
        self._page[self._slot] = 0

    @property
    def alone(self) -> bool:
        """Whether no other worker computes."""
        return not any(self._others())

    @property
    def crowded(self) -> bool:
        """Whether the fewest threads of this worker and those that compute are more than the cores."""
        return crowded(self._others(), self._minimum, self._cores)

    def _others(self) -> bytes:
        return self._page[: self._slot] + self._page[self._slot + 1 :]


def _open(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(descriptor, SLOTS)
        return mmap.mmap(descriptor, SLOTS)
    finally:
        os.close(descriptor)
