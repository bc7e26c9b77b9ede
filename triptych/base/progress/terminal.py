"""Progress on a terminal: a bar for each running step, below the cursor."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console

from triptych.base.progress.screen import CLEAR, frame
from triptych.base.progress.step import StepState
from triptych.base.progress.tasks import StepTasks

#: Seconds between two frames. A step that ends before the first one is never seen.
FRAME_SECONDS = 0.25


class TerminalRenderer:
    """A renderer that draws, from a thread of its own that lives as long as there are steps."""

    interval = 0.1

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._stream = stream
        self._console = Console(
            file=stream,
            force_terminal=True,
            legacy_windows=False,
            no_color=bool(environ.get("NO_COLOR")),
            _environ=environ,
        )
        self._steps = StepTasks(clock)
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
            self._steps.forget(state.key)
            if not self._steps:
                self._clear()
                self._wake.set()

    def keep(self, state: StepState) -> None:
        """As `show`, but an ended step stays too, until `close`."""
        with self._lock:
            self._steps.follow(state)
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
        with self._lock, self._surviving():
            columns, rows = self._console.size
            with self._console.capture() as drawn:
                if self._steps:
                    self._console.print(self._steps.table(max(1, rows - 2)), width=max(1, columns - 1))
            self._write(frame(drawn.get().splitlines()))
            self._drawn = bool(drawn.get())

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
            with self._surviving():
                self._write(CLEAR)
            self._drawn = False

    def _write(self, text: str) -> None:
        encoding = self._console.encoding
        self._stream.write(text.encode(encoding, "replace").decode(encoding))
        self._stream.flush()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """The terminal may be gone; the work goes on."""
        try:
            yield
        except (OSError, ValueError):
            self._steps.clear()
