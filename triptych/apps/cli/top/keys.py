"""Keys of the terminal view: `q` ends it."""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def end_keys(keyboard: TextIO | None = None) -> Iterator[Callable[[float], bool]]:
    """A function that waits some seconds, or until `q` is pressed, and then is True. An input that is no
    terminal is left alone."""
    keyboard = keyboard or sys.stdin
    if not keyboard.isatty():
        yield lambda seconds: threading.Event().wait(seconds)
        return

    def wait(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while select.select([keyboard], [], [], max(0.0, deadline - time.monotonic()))[0]:
            keys = os.read(keyboard.fileno(), 64)
            if not keys or b"q" in keys.lower():
                return True
        return False

    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield wait
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
