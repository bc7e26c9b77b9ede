"""The heap of this process: what glibc's malloc keeps of freed memory, and when Python collects garbage."""

from __future__ import annotations

import contextlib
import ctypes
import gc

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_THRESHOLD_BYTES = 1 << 20
_ARENAS = 2


def trim_heap() -> None:
    """Returns freed memory to the system. Other C libraries keep theirs: nothing is raised."""
    with contextlib.suppress(OSError, AttributeError):
        # It looks at every arena, without the interpreter's lock.
        ctypes.CDLL(None).malloc_trim(0)


def bound_heap() -> None:
    """Makes glibc return the memory of large blocks when they are freed, and share free memory among threads.

    By default it keeps blocks of up to 32 MiB for each of its arenas once one such block was freed, and gives
    each of gRPC's threads an arena of its own, whose free memory no other thread uses.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
        libc.mallopt(_M_ARENA_MAX, _ARENAS)


def collect_rarely() -> None:
    """Collects garbage less often, and never looks at the objects that exist now: tokens make no cycles.

    Requests do, through gRPC and HTTP: the oldest generation is collected every 40 000 objects, or what has
    survived two collections would stay for good.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 2, 2)
