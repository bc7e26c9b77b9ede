"""Progress on a terminal: a bar for each running step, below the cursor."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from triptych.progress.screen import CLEAR, frame, style_of
from triptych.progress.step import StepState
from triptych.progress.text import bar, label_width
from triptych.progress.tracked import TrackedStep

#: Seconds between two frames. A step that ends before the first one is never seen.
FRAME_SECONDS = 0.25


class TerminalRenderer:
    """A renderer that draws, from a thread of its own that lives as long as there are steps."""

    interval = 0.1

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._style = style_of(stream)
        self._steps: dict[str, TrackedStep] = {}
        self._lock = threading.RLock()
        self._drawn = False
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def show(self, state: StepState) -> None:
        """Has the next frame show this state; the bar of an ended step goes."""
        with self._lock:
            if not state.ended:
                self.keep(state)
                return
            self._steps.pop(state.key, None)
            if not self._steps:
                self._clear()
                self._wake.set()

    def keep(self, state: StepState) -> None:
        """As `show`, but an ended step stays too, until `close`."""
        now = self._clock()
        with self._lock:
            known = self._steps.get(state.key)
            if known is None or known.state.label != state.label:
                self._steps[state.key] = TrackedStep(state, now)
            else:
                known.follow(state, now)
            if self._thread is None:
                self._wake.clear()
                self._thread = threading.Thread(target=self._draw_frames, name="progress", daemon=True)
                self._thread.start()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Keeps the terminal free of bars within the `with`, for what else is printed there."""
        with self._lock:
            self._clear()
            yield

    def ready(self) -> None:
        """As `close`."""
        self.close()

    def close(self) -> None:
        """Ends all steps, and leaves nothing on the terminal."""
        with self._lock:
            self._steps.clear()
            self._clear()
            self._wake.set()

    def draw(self) -> None:
        """Draws a frame now."""
        with self._lock:
            columns, rows = self._size()
            now = self._clock()
            shown = list(self._steps.values())[: max(1, rows - 2)]
            width = label_width((step.state.label for step in shown), columns)
            lines = [
                bar(step.state, step.seconds(now), step.left(now), columns - 1, self._style, width)
                for step in shown
            ]
            self._write(frame(lines))
            self._drawn = bool(lines)

    def _draw_frames(self) -> None:
        while True:
            self._wake.wait(FRAME_SECONDS)
            with self._lock:
                if not self._steps:
                    self._thread = None
                    return
                self._wake.clear()
                self.draw()

    def _clear(self) -> None:
        if self._drawn:
            self._write(CLEAR)
            self._drawn = False

    def _size(self) -> tuple[int, int]:
        try:
            size = os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return 80, 24
        return size.columns or 80, size.lines or 24

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The terminal is gone; the work goes on.
            self._steps.clear()
