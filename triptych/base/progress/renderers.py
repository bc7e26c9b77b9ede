"""Renderers of progress, and which one a process has: bars on a terminal, the launcher's, or lines."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import Console
from rich.progress import Task

from triptych.base.progress.progress import Renderer, ShortText, StepState, current_renderer
from triptych.base.progress.screen import CLEAR, can_draw, frame
from triptych.base.progress.tasks import StepTasks, left, line, seconds

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


#: A line follows another after this share of the step, but not before these seconds; and after these in any
#: case, if the step goes on at all.
SHARE = 0.1
MIN_SECONDS = 5.0
MAX_SECONDS = 30.0
#: A step that took longer, or that had lines, says when it ends.
_SHORT_SECONDS = 1.0


def due(seconds: float, shares: float) -> bool:
    """Whether a line follows one so many seconds and such a share of the step ago."""
    return seconds >= MAX_SECONDS or (seconds >= MIN_SECONDS and shares >= SHARE)


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


#: The variable with the socket's path, while the launcher has a display.
VARIABLE = "TRIPTYCH_PROGRESS"
#: Datagrams are far shorter; one that is not is no state.
MAX_BYTES = 4096


class _Datagram(msgspec.Struct):
    name: ShortText
    state: StepState


class LauncherRenderer:
    """A renderer that sends states to the launcher; `name` is this worker's, such as "pd-0".

    OSError when the launcher listens no longer.
    """

    interval = 0.25

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setblocking(False)
        try:
            self._socket.connect(str(path))
        except OSError:
            self._socket.close()
            raise

    def show(self, state: StepState) -> None:
        """Sends it; the launcher may be gone, or have more to read than it keeps."""
        with contextlib.suppress(OSError):
            self._socket.send(encode(self._name, state))

    def ready(self) -> None:
        """Sends that this worker waits for the others."""
        self.show(StepState("ready", "ready", ended=True))

    def close(self) -> None:
        self._socket.close()


def encode(name: str, state: StepState) -> bytes:
    """A datagram of this worker's state."""
    return msgspec.json.encode(_Datagram(name, state))


def decode(data: bytes) -> tuple[str, StepState] | None:
    """(worker, state) of a datagram; None for anything else."""
    try:
        datagram = msgspec.json.decode(data, type=_Datagram)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return datagram.name, datagram.state


logger = logging.getLogger("progress")

#: Of a command, which also prints between its steps.
CommandRenderer = TerminalRenderer | LineRenderer


def command_renderer() -> CommandRenderer:
    """The renderer of a command that prints results: bars on stderr's terminal, else lines on stderr."""
    if can_draw(sys.stderr):
        return TerminalRenderer(sys.stderr)
    return LineRenderer(print_line)


def process_renderer() -> CommandRenderer:
    """The renderer of this process where it is a command's, else a new one: a terminal has one that draws."""
    known = current_renderer()
    return known if isinstance(known, CommandRenderer) else command_renderer()


def service_renderer(name: str, *, json: bool, environ: Mapping[str, str] = os.environ) -> Renderer:
    """The renderer of a service called `name`: its launcher's display, bars on its terminal, or the log.

    With `json` logs always the log, where every line is a record.
    """
    path = environ.get(VARIABLE, "")
    if path and not json:
        try:
            return LauncherRenderer(Path(path), name)
        except OSError:
            # The cluster is up, and this worker one that started again.
            return LineRenderer(_log)
    if not json and can_draw(sys.stderr, environ):
        return TerminalRenderer(sys.stderr)
    return LineRenderer(_log)


def print_line(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def _log(text: str) -> None:
    logger.info("%s", text)
