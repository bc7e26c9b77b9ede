"""The store server's clock: how scripts read it, and how its jumps are found."""

from __future__ import annotations

#: The first lines of every script with deadlines: `now`, in milliseconds of the server's clock. The clocks
#: of workers differ, so deadlines are compared in the server.
NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

#: More than clocks drift apart between two answers, less than the life of anything in the store.
SLACK_SECONDS = 5.0


class ServerClock:
    """A counter of the jumps of a server's clock against our monotonic one. Pure.

    What expires by the server's clock expires at once when that jumps ahead: an administrator has set it, or
    a machine was suspended or moved. No worker was too slow then.
    """

    def __init__(self, slack: float = SLACK_SECONDS) -> None:
        self.jumps = 0
        self._slack = slack
        #: Bounds of the server's time less ours.
        self._bounds: tuple[float, float] | None = None

    def answered(self, server: float, sent: float, received: float) -> None:
        """The server's time in an answer to what we sent and received then, all in seconds."""
        low, high = server - received, server - sent
        known, self._bounds = self._bounds, (low, high)
        if known is not None and (low > known[1] + self._slack or high < known[0] - self._slack):
            self.jumps += 1
