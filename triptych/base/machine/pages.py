"""Pages of memory: of 2 MiB where each step reads it (weights in two thirds of the time), or before use."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE, _MADV_COLLAPSE = 23, 25
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages(address: int, count: int) -> bool:
    """Brings written memory into huge pages, whole pages around it too; whether the system did."""
    # A refusal changes nothing: Linux before 6.1, or no memory in one piece.
    return _advise(address, count, HUGE_PAGE, _MADV_COLLAPSE)


def populate(address: int, count: int) -> bool:
    """Gives memory its pages as if it was written, and leaves what is in it; whether the system did.

    Other threads may write there meanwhile.
    """
    # Linux before 5.14 refuses.
    return _advise(address, count, mmap.PAGESIZE, _MADV_POPULATE_WRITE)


def _advise(address: int, count: int, page: int, advice: int) -> bool:
    """Whether the system takes this advice about memory, in whole pages."""
    if sys.platform != "linux" or count < 1:
        return False
    first, last = address // page * page, -(-(address + count) // page) * page
    code = ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)
    return int(code) == 0


def why_no_huge_pages(setting: Path = _SETTING) -> str:
    """Why this system gives none; "" where it gives them."""
    if sys.platform != "linux":
        return "they are asked for on Linux alone"
    try:
        chosen = setting.read_text()
    except OSError:
        return f"there is no {setting}"
    return f"{setting} says never: write madvise there" if "[never]" in chosen else ""
