"""RecentHolders: whether more than one key, or address, has asked for something lately."""

from __future__ import annotations

import time
from collections.abc import Callable

#: A client that asks now and then is not forgotten between two of its requests.
RECENT_SECONDS = 10.0


class RecentHolders:
    """Says whether several holders share something now: then it is cut fine, so that nobody waits for long.

    What is cut fine costs more in all, which one holder alone need not pay.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: str | None = None
        self._shared_until: float | None = None

    def note(self, holder: str) -> None:
        """The holder asks now."""
        if holder != self._last:
            if self._last is not None:
                self._shared_until = self._clock() + RECENT_SECONDS
            self._last = holder

    @property
    def several(self) -> bool:
        """Whether the holder has changed in the last seconds; with one alone without a look at the clock."""
        if self._shared_until is not None and self._clock() >= self._shared_until:
            self._shared_until = None
        return self._shared_until is not None
