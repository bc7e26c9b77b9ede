"""Whether a PD worker's engine stands still, by the beats and events of its stream."""

from __future__ import annotations

import math

from triptych.base.engine_beat import SLOW_FACTOR, Life, StallClock, judge
from triptych.protos import pd_pb2

#: Seconds between two checks.
LOOK_SECONDS = 1.0


class StallWatch:
    """Fed with every message of one worker's stream, looked at every `LOOK_SECONDS`.

    A worker that has never sent a beat is not judged: it is of a version without them. `limit` is in seconds,
    0 for none. The proxy's own pauses count no time (see `StallClock`).
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit or math.inf
        self._clock = StallClock(LOOK_SECONDS, self._limit)
        self._beats = False
        self._count = 0
        self._patience = 1.0
        #: Changes whenever the engine has shown that it moves.
        self._moves = 0

    def observe(self, message: pd_pb2.StepEvents) -> None:
        """One message of the stream."""
        if message.HasField("beat"):
            beat = message.beat
            # Any other count is progress: a smaller one is that of a process that was restarted.
            if beat.count != self._count or not self._beats:
                self._moves += 1
            self._beats, self._count = True, beat.count
            self._patience = beat.patience if 1.0 <= beat.patience <= SLOW_FACTOR else 1.0
        if message.events or message.HasField("tokens"):
            self._moves += 1

    def stalled(self, now: float) -> bool:
        """A poll: whether neither event nor progress has been seen for longer than the limit."""
        still = self._clock.poll(self._moves, now)
        return self._beats and judge(still, self._limit * self._patience) is Life.STALLED
