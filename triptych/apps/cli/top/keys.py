"""Keys of the terminal view: `q` ends it."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_END = b"qQ"
#: Keys that one reading takes.
_MAX_KEYS = 64


@contextmanager
def end_keys(stdin: TextIO | None = None) -> Iterator[Callable[[float], bool]]:
    """A function that waits some seconds, or until `q` is pressed, and then is True.

    It reads keys without a line end; an input that is no terminal is left alone. Ctrl-C works as before.
    """
    keyboard = stdin or sys.stdin
    if not keyboard.isatty():
        yield _sleep
        return
    handle = keyboard.fileno()
    before = termios.tcgetattr(handle)
    tty.setcbreak(handle)

    def wait(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([handle], [], [], left)[0]:
                return False
            keys = os.read(handle, _MAX_KEYS)
            if not keys or any(key in _END for key in keys):
                return True  # the terminal is gone, or the user wants to go
        return False

    try:
        yield wait
    finally:
        termios.tcsetattr(handle, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False
