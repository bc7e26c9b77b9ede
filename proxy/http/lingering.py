"""Lingering: what a client sends behind the reply that ends its connection is read for a while, and dropped.

A socket that is closed with bytes unread, or that gets some later, is reset, and with that a reply is lost
that the client has not read: many read only when they have sent their whole body.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: Bytes of one connection that are dropped at most: a few of the largest bodies.
LINGER_BYTES = 256 << 20
#: Seconds for which nothing may come.
LINGER_SECONDS = 5.0


@dataclass(slots=True)
class Lingering:
    """What may still come on one connection: `left` bytes, until a moment, without a pause. Then `end`."""

    end: Callable[[], None]
    left: int
    until: float
    last: float

    def drop(self, size: int, now: float) -> None:
        self.left -= size
        self.last = now
        self.sweep(now)

    def sweep(self, now: float) -> None:
        if self.left <= 0 or now >= self.until or now - self.last >= LINGER_SECONDS:
            self.end()
