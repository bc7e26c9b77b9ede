"""The store server's clock: how scripts read it, and how its jumps are found."""

from __future__ import annotations

#: The first lines of every script with deadlines: `now`, in milliseconds of the server's clock. The clocks
#: of workers differ, so deadlines are compared in the server.
NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

#: More than clocks drift between two replies, less than the shortest term in the store.
SLACK_SECONDS = 5.0


class ServerClock:
    """A counter of jumps of the server's clock against this process's monotonic clock. Pure.

    When the server's clock jumps ahead, leases and registrations expire at once although their owners live:
    the clock was set, or the machine was suspended or migrated.
    """

    def __init__(self, slack: float = SLACK_SECONDS) -> None:
        self.jumps = 0
        self._slack = slack
        #: Bounds of the server's time less ours.
        self._bounds: tuple[float, float] | None = None

    def answered(self, server: float, sent: float, received: float) -> None:
        """Adds the `server`'s time from a reply; its command was `sent` and answered (`received`) then."""
        low, high = server - received, server - sent
        known, self._bounds = self._bounds, (low, high)
        if known is not None and (low > known[1] + self._slack or high < known[0] - self._slack):
            self.jumps += 1
