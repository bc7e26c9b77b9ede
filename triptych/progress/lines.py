"""Progress where there is no terminal: a line as a step begins, some as it goes on, one at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from triptych.progress.step import StepState
from triptych.progress.text import line
from triptych.progress.tracked import TrackedStep

#: A line follows another after this share of the step, but not before these seconds; and after these in any
#: case, if the step goes on at all.
SHARE = 0.1
LEAST_SECONDS = 5.0
MOST_SECONDS = 30.0
#: A step that took longer, or that had lines, says when it ends.
_SHORT_SECONDS = 1.0


def due(seconds: float, shares: float) -> bool:
    """Whether a line follows one so many seconds and such a share of the step ago."""
    return seconds >= MOST_SECONDS or (seconds >= LEAST_SECONDS and shares >= SHARE)


class _Lines:
    """The lines of one step: when the last one was, and where the step then stood."""

    def __init__(self, tracked: TrackedStep, now: float) -> None:
        self.tracked = tracked
        self.at = now
        self.share = tracked.state.share or 0.0
        self.count = 1


class LineRenderer:
    """A renderer that writes lines by `write`, such as a logger's method."""

    interval = 1.0

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._steps: dict[str, _Lines] = {}
        self._lock = threading.Lock()

    def show(self, state: StepState) -> None:
        """Writes a line where one is due."""
        now = self._clock()
        with self._lock:
            known = self._steps.get(state.key)
            if known is None:
                tracked = TrackedStep(state, now)
                if not state.ended:
                    self._steps[state.key] = _Lines(tracked, now)
                text = line(state, 0.0, None)
            else:
                known.tracked.follow(state, now)
                if not self._is_due(known, now):
                    return
                known.at, known.share, known.count = now, state.share or 0.0, known.count + 1
                text = line(state, known.tracked.seconds(now), known.tracked.left(now))
        self._write(text)

    def ready(self) -> None:
        """Nothing: the service's own log says so."""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """As a terminal's; lines stand in nobody's way."""
        yield

    def _is_due(self, known: _Lines, now: float) -> bool:
        state = known.tracked.state
        if state.ended:
            del self._steps[state.key]
            return known.count > 1 or known.tracked.seconds(now) >= _SHORT_SECONDS
        # When all is done, the end says it.
        return state.share != 1 and due(now - known.at, (state.share or 0.0) - known.share)
