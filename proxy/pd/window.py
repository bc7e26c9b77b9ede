"""How many Submits of one PD worker may be unanswered, by how fast it answers. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 1024.0


@dataclass(frozen=True, slots=True)
class WindowLimits:
    """How many Submits it begins with and keeps at least, and the seconds from which an answer is slow.

    A slow answer is a sign of congestion: a worker prepares a usual prompt in milliseconds.
    """

    first: float
    least: float
    slow: float


#: For one tenant alone, and where several share a worker: a tenant's Submit waits behind those of others that
#: are sent, for as long as a slow answer takes.
ALONE = WindowLimits(32.0, 16.0, 0.1)
SHARED = WindowLimits(8.0, 4.0, 0.02)


class SubmitWindow:
    """Grows by one for as many answers in time as it holds, halves with a slow one; never below the least.

    What does not fit waits at the proxy, in turns between tenants. Nothing here ends a Submit or repeats one.
    """

    def __init__(self, limits: WindowLimits = ALONE) -> None:
        self._limits = limits
        self.size = limits.first
        #: Slow answers to what was sent before have been counted.
        self._cut_at = float("-inf")

    def open(self, unanswered: int) -> bool:
        """Whether one more may be sent."""
        return unanswered < int(self.size)

    def answered(self, sent_at: float, now: float) -> bool:
        """The worker has answered; whether the window has shrunk by it."""
        if now - sent_at <= self._limits.slow:
            self.size = min(MOST, self.size + 1 / self.size)
            return False
        if sent_at < self._cut_at:
            return False
        self._cut_at = now
        before, self.size = self.size, max(self._limits.least, self.size / 2)
        return self.size < before
