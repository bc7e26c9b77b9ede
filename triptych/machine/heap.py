"""The heap of this process: what glibc's malloc keeps of freed memory."""

from __future__ import annotations

import contextlib
import ctypes


def trim_heap() -> None:
    """Returns freed memory to the system. Other C libraries keep theirs: nothing is raised."""
    with contextlib.suppress(OSError, AttributeError):
        # It looks at every arena, without the interpreter's lock.
        ctypes.CDLL(None).malloc_trim(0)
