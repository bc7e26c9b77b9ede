"""Steps of long work as lines of the log `progress`: as a step begins, every five seconds, and at its end.

A service has the lines in its log; a command, which has none, writes them to stderr by `lines_on_stderr`.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from triptych.base.config.flags import format_size

logger = logging.getLogger("progress")

#: The unit of steps that are counted in bytes: shown as sizes.
BYTES = "bytes"
#: Seconds between two lines of a step.
INTERVAL = 5.0
#: A step that took longer, or that had lines in between, says when it ends.
_SHORT_SECONDS = 1.0

T = TypeVar("T")


class Progress:
    """One step of long work, from its making to its end, in a `with`: `total` units, or unknown.

    For one thread. `advance` costs a look at the clock.
    """

    def __init__(
        self,
        label: str,
        total: float | None = None,
        unit: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._total, self._unit, self._clock = label, total, unit, clock
        self._done = 0.0
        self._note = ""
        self._left: float | None = None
        self._began = self._said_at = clock()
        self._lines = 0
        self._say()

    def advance(
        self,
        count: float = 1,
        *,
        total: float | None = None,
        note: str | None = None,
        left: float | None = None,
    ) -> None:
        """Counts `count` more units as done. A `total` that has become known, a `note`, and the seconds that
        are `left`, where the work knows better than its pace, replace those before.
        """
        self._done += count
        self._total = self._total if total is None else total
        self._note = self._note if note is None else note
        self._left = left
        if self._clock() - self._said_at >= INTERVAL:
            self._say(self._remaining())

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        took = self._clock() - self._began
        if kind is None and self._total is not None:
            self._done = max(self._done, self._total)
        if took >= _SHORT_SECONDS or self._lines > 1:
            self._say(f"{'in' if kind is None else 'given up after'} {duration(took)}")

    @property
    def _share(self) -> float | None:
        """Between 0 and 1; None where the total is unknown. Nothing to do is all done."""
        if self._total is None:
            return None
        return min(max(self._done / self._total, 0.0), 1.0) if self._total > 0 else 1.0

    def _remaining(self) -> str:
        share, took = self._share, self._clock() - self._began
        left = took / share - took if self._left is None and share else self._left
        if left is None:
            return f"for {duration(took)}"
        return f"about {duration(max(1.0, left))} left" if share != 1 else ""

    def _say(self, time_of: str = "") -> None:
        self._said_at = self._clock()
        self._lines += 1
        share = "" if self._share is None else f"{int(self._share * 100)} %"
        shown = ", ".join(part for part in (share, self._amount(), self._note, time_of) if part)
        logger.info("%s", f"{self._label}: {shown}" if shown else self._label)

    def _amount(self) -> str:
        """What is done of the total, in its unit; "" where there is nothing to count."""
        if self._unit == BYTES:
            done = format_size(self._done)
            return done if self._total is None else f"{done} of {format_size(self._total)}"
        unit = f" {self._unit}" if self._unit else ""
        if self._total is None:
            return f"{self._done:g}{unit}" if self._done else ""
        return f"{self._done:.6g} of {self._total:.6g}{unit}"


def each(label: str, items: Sequence[T], unit: str = "") -> Iterator[T]:
    """The items, as a step that is one unit further with each."""
    with Progress(label, len(items), unit) as running:
        for item in items:
            yield item
            running.advance()


def duration(seconds: float) -> str:
    """Seconds for people: "12 s", "3 min 20 s", "2 h 5 min"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    minutes = whole // 60
    return f"{minutes // 60} h" + (f" {minutes % 60} min" if minutes % 60 else "")


@contextmanager
def lines_on_stderr() -> Iterator[None]:
    """Writes the lines of this process's steps to stderr as they are, within the `with`."""
    handler, level = logging.StreamHandler(sys.stderr), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
