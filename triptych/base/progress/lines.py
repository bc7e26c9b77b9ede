"""Progress where there is no terminal: a line as a step begins, some as it goes on, one at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.progress import Task

from triptych.base.progress.step import StepState
from triptych.base.progress.tasks import StepTasks, left, seconds
from triptych.base.progress.text import line

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


@dataclass(slots=True)
class _LastLine:
    """The last line of a step: when it was, how far the step then was, and how many there have been."""

    at: float
    share: float
    count: int = 1


class LineRenderer:
    """A renderer that writes lines by `write`, such as a logger's method."""

    interval = 1.0

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._tasks = StepTasks(clock)
        self._lock = threading.Lock()

    def show(self, state: StepState) -> None:
        """Writes a line where one is due."""
        with self._lock:
            task = self._tasks.follow(state)
            last: _LastLine | None = task.fields.get("line")
            if is_due := last is None or _is_due(state, last, task):
                count = last.count + 1 if last is not None else 1
                task.fields["line"] = _LastLine(task.get_time(), state.share or 0.0, count)
            if state.ended:
                self._tasks.forget(state.key)
        if is_due:
            self._write(line(state, seconds(task), left(task)))

    def ready(self) -> None:
        """Nothing: the service's own log says so."""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """As a terminal's; lines stand in nobody's way."""
        yield


def _is_due(state: StepState, last: _LastLine, task: Task) -> bool:
    if state.ended:
        return last.count > 1 or seconds(task) >= _SHORT_SECONDS
    # When all is done, the end says it.
    return state.share != 1 and due(task.get_time() - last.at, (state.share or 0.0) - last.share)
