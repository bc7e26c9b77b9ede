"""Which renderer a process has: the launcher's display, a terminal, or lines."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from triptych.base.progress.progress import Renderer, current_renderer
from triptych.base.progress.renderers import VARIABLE, LauncherRenderer, LineRenderer, TerminalRenderer
from triptych.base.progress.screen import can_draw

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
