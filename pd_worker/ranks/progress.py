"""Wake-ups from the other ranks: a pipe that each writes to when one of its transfers has made progress.

Replies answer commands only, and an idle engine sends none.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

_READ_BYTES = 4096
_JOIN_SECONDS = 5.0


class ProgressListener:
    """Rank 0's end: a thread that calls `on_progress` when a rank has written."""

    def __init__(self, on_progress: Callable[[], None]) -> None:
        self._on_progress = on_progress
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rank-progress", daemon=True)
        self._thread.start()

    @property
    def descriptor(self) -> int:
        """The end to write to, for the other ranks."""
        return self._writing

    def handed_out(self) -> None:
        """The ranks have the end to write to: the thread ends with the last of them."""
        os.close(self._writing)

    def join(self) -> None:
        """Waits for the end of the thread, once all ranks have ended."""
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while os.read(self._reading, _READ_BYTES):
            self._on_progress()
        os.close(self._reading)


class ProgressWriter:
    """Another rank's end."""

    def __init__(self, descriptor: int) -> None:
        """Keeps a copy of the descriptor."""
        self._descriptor = os.dup(descriptor)
        os.set_blocking(self._descriptor, False)

    def write(self) -> None:
        """Wakes rank 0. Called from any thread; never blocks."""
        # A full pipe wakes rank 0 anyway, and one without a reader belongs to a worker that ends.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._descriptor, b"1")

    def close(self) -> None:
        os.close(self._descriptor)
