"""Refuses new media requests while embeddings get lost before anybody has loaded them."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 30.0
LIMIT = 0.10
#: A few lost items say nothing yet about the pace of the PD workers.
LEAST_LOSSES = 4


class Backpressure:
    """Encoder work of the last 30 s, split into first encodes and re-encodes. Pure; `now` in seconds."""

    def __init__(self, *, flow_control: bool = True) -> None:
        self._flow_control = flow_control
        self._jobs: deque[tuple[float, float, bool]] = deque()
        self._work = {False: 0.0, True: 0.0}
        self._losses = 0

    def record(self, work: float, now: float, *, re_encode: bool) -> None:
        """An encoder job of `work`. Losses by a flushed or restarted store are recorded as first encodes."""
        self._jobs.append((now, work, re_encode))
        self._work[re_encode] += work
        self._losses += re_encode

    def refuses_media(self, now: float) -> bool:
        """Whether a new request with media should come back later."""
        self._forget(now - WINDOW_SECONDS)
        if not self._flow_control or self._losses < LEAST_LOSSES:
            return False
        return self._work[True] > LIMIT * (self._work[True] + self._work[False])

    def _forget(self, before: float) -> None:
        while self._jobs and self._jobs[0][0] < before:
            _, work, re_encode = self._jobs.popleft()
            self._work[re_encode] -= work
            self._losses -= re_encode
