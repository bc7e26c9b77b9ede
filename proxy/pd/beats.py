"""Beats of a PD worker's engine on its stream: the load that it reports, and whether it stands still."""

from __future__ import annotations

import math

from triptych.base.engine_beat import SLOW_FACTOR, Life, StallClock, judge
from triptych.protos import pd_pb2
from triptych.proxy.ports import PDLoadReport

#: A report that is older says nothing of now: a worker sends one every second.
FRESH_SECONDS = 10.0


class LoadReports:
    """The newest load report of one worker, updated at every beat of its stream."""

    def __init__(self) -> None:
        self._report: PDLoadReport | None = None
        self._at = 0.0
        self._tokens = 0

    def observe(self, beat: pd_pb2.Beat, now: float) -> None:
        """One beat; one without a load is of a worker of an earlier release."""
        if not beat.HasField("load"):
            return
        load, seconds = beat.load, now - self._at
        # Fewer tokens than before are those of a process that was restarted.
        tokens = load.generated_tokens - self._tokens
        known = self._report is not None and seconds > 0 and tokens >= 0
        self._report = PDLoadReport(
            running=load.running,
            waiting=load.waiting,
            kv_usage=_share(load.kv_usage),
            cache_usage=_share(load.cache_usage),
            tokens_per_second=tokens / seconds if known else 0.0,
        )
        self._at, self._tokens = now, load.generated_tokens

    def latest(self, now: float) -> PDLoadReport | None:
        return self._report if now - self._at < FRESH_SECONDS else None


def _share(value: float) -> float:
    """Between 0 and 1, whatever a worker sends; 0 for NaN."""
    return min(max(value, 0.0), 1.0) if value == value else 0.0


#: Seconds between two checks.
LOOK_SECONDS = 1.0


class StallWatch:
    """Fed with every message of one worker's stream, looked at every `LOOK_SECONDS`.

    A worker that has never sent a beat is not judged: it is of a version without them. `limit` is in seconds,
    0 for none. The proxy's own pauses count no time (see `StallClock`).
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit or math.inf
        self._clock = StallClock(LOOK_SECONDS)
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
