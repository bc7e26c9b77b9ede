"""A lock of one device while a worker starts: each measures the memory that the others have left it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time

logger = logging.getLogger(__name__)

#: How long a worker waits for others on its device to start, and how often it tries.
PATIENCE_SECONDS, POLL_SECONDS = 600.0, 0.2


class StartLock:
    """Held by one process of a network namespace, until `release` or its end; `name` "" is never locked.

    It is an abstract socket's name, which Linux gives to one socket at a time, and frees with its process.
    """

    def __init__(self, name: str, patience: float = PATIENCE_SECONDS) -> None:
        self._name, self._patience = name, patience
        self._socket: socket.socket | None = None

    def acquire(self) -> StartLock:
        """Blocks while another process holds it; after the patience, goes on without it, with a warning."""
        deadline = time.monotonic() + self._patience
        while not self.try_acquire(last=time.monotonic() >= deadline):
            time.sleep(POLL_SECONDS)
        return self

    async def acquired(self) -> None:
        """As `acquire`, in an event loop."""
        deadline = time.monotonic() + self._patience
        while not self.try_acquire(last=time.monotonic() >= deadline):
            await asyncio.sleep(POLL_SECONDS)

    def try_acquire(self, *, last: bool = False) -> bool:
        """Whether it is held now, or this process goes on without it, which it does the `last` time."""
        if not self._name:
            return True
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.bind(f"\0triptych-start-{self._name}")
        except OSError:
            if last:
                logger.warning("another process still starts on %s: give --device-memory", self._name)
            return last
        return True

    def release(self) -> None:
        """Lets the next process start. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
