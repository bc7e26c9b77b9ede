"""Pages of 2 MiB for memory that each step reads: a weight is read in two thirds of the time."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages(address: int, count: int) -> bool:
    """Brings written memory into huge pages, whole pages around it too; whether the system did."""
    first, last = address // HUGE_PAGE * HUGE_PAGE, -(-(address + count) // HUGE_PAGE) * HUGE_PAGE
    return _advise(first, last, _MADV_COLLAPSE)


def ask_for_huge_pages(address: int, count: int) -> bool:
    """Has memory that is not yet written come in huge pages, as it is written; whether the system does."""
    first, last = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + count) // HUGE_PAGE * HUGE_PAGE
    return first < last and _advise(first, last, _MADV_HUGEPAGE)


def why_no_huge_pages(setting: Path = _SETTING) -> str:
    """Why this system gives none; "" where it gives them."""
    if sys.platform != "linux":
        return "they are asked for on Linux alone"
    try:
        chosen = setting.read_text()
    except OSError:
        return f"there is no {setting}"
    return f"{setting} says never: write madvise there" if "[never]" in chosen else ""


def _advise(first: int, last: int, advice: int) -> bool:
    # A refusal changes nothing: Linux before 6.1, or no memory in one piece.
    if sys.platform != "linux" or first >= last:
        return False
    call = ctypes.CDLL(None).madvise
    return int(call(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)) == 0
