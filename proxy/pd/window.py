"""How many Submits of one PD worker may be unanswered, by how fast it answers. Pure values."""

from __future__ import annotations

#: A worker takes the fewest in some tens of milliseconds: so long another tenant's Submit waits behind them.
FIRST, LEAST, MOST = 32.0, 16.0, 1024.0
#: An answer that takes longer is a sign of congestion: a worker prepares a usual prompt in milliseconds.
SLOW_SECONDS = 0.1


class SubmitWindow:
    """Grows by one for as many answers in time as it holds, halves with a slow one; never below LEAST.

    What does not fit waits at the proxy, in turns between tenants. Nothing here ends a Submit or repeats one.
    """

    def __init__(self) -> None:
        self.size = FIRST
        #: Slow answers to what was sent before have been counted.
        self._cut_at = float("-inf")

    def open(self, unanswered: int) -> bool:
        """Whether one more may be sent."""
        return unanswered < int(self.size)

    def answered(self, sent_at: float, now: float) -> bool:
        """The worker has answered; whether the window has shrunk by it."""
        if now - sent_at <= SLOW_SECONDS:
            self.size = min(MOST, self.size + 1 / self.size)
            return False
        if sent_at < self._cut_at:
            return False
        self._cut_at = now
        before, self.size = self.size, max(LEAST, self.size / 2)
        return self.size < before
