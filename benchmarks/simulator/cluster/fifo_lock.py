"""A lock for what serves one user at a time: a worker's device, and the proxy's event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class FifoLock:
    """Granted in the order of asking. Its holder may ask to be called when another user begins to wait."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._held = False
        self._on_waiter: Callable[[], None] | None = None

    @property
    def contended(self) -> bool:
        return bool(self._waiting)

    def acquire(self, granted: Callable[[], None]) -> None:
        """Calls `granted` now if the lock is free, else after the users that wait already."""
        if not self._held:
            self._held = True
            granted()
            return
        self._waiting.append(granted)
        if self._on_waiter is not None:
            self._on_waiter()

    def on_waiter(self, call: Callable[[], None]) -> None:
        """What is called when a user begins to wait, until the lock is released."""
        self._on_waiter = call

    def release(self) -> None:
        assert self._held, "the lock is free"
        self._on_waiter = None
        self._held = bool(self._waiting)
        if self._waiting:
            self._waiting.popleft()()
