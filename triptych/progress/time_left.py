"""Estimate of the time that a step still needs, from its progress so far. Pure."""

from __future__ import annotations

#: What was this long ago counts half as much; at least four advances count.
HALF_LIFE_SECONDS = 20.0
_HALF_LIFE_GAPS = 4
#: Before that nothing is said.
LEAST_SECONDS = 0.5
#: A step without advance for so long, and for so many times its usual gap, may never go on.
STALLED_SECONDS = 30.0
_STALLED_GAPS = 5


class TimeLeft:
    """An estimate of one step; `now` is any clock's, in seconds. One that goes back counts as standing."""

    def __init__(self, now: float) -> None:
        self._last = now
        self._done = 0.0
        # Sums that fade: units, seconds and advances.
        self._work = self._time = self._advances = 0.0

    def observe(self, now: float, done: float) -> None:
        """The step has `done` units at `now`. Fewer than before: it began again, and what it did counts."""
        seconds, work = max(0.0, now - self._last), done - self._done
        if work == 0 and seconds:
            # A gap ends with an advance.
            return
        fade = 0.5 ** (seconds / max(HALF_LIFE_SECONDS, _HALF_LIFE_GAPS * self._gap))
        self._work = self._work * fade + max(0.0, work)
        self._time = self._time * fade + seconds
        self._advances = self._advances * fade + (work > 0)
        self._last, self._done = now, done

    def left(self, now: float, total: float | None) -> float | None:
        """Seconds until `total`; None while nothing can be said: at first, stalled, without a total."""
        if total is None:
            return None
        rest = total - self._done
        if rest <= 0:
            return 0.0
        idle = max(0.0, now - self._last)
        if self._work <= 0 or self._time < LEAST_SECONDS:
            return None
        gap = self._gap
        if idle <= gap:
            return max(0.0, rest * self._time / self._work - idle)
        if idle > max(STALLED_SECONDS, _STALLED_GAPS * gap):
            return None
        # Slower than it was, as far as one can tell: the advance is overdue.
        return max(0.0, rest * (self._time + idle - gap) / self._work - gap)

    @property
    def _gap(self) -> float:
        """Seconds between two advances."""
        return self._time / self._advances if self._advances else 0.0
