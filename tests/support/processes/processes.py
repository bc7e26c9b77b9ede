"""Whether processes that the tests started still run."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def lives(pid: int) -> bool:
    """Whether it runs; a dead process that nobody has reaped yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def survivors(pids: Iterable[int], seconds: float = 30.0) -> list[int]:
    """Those that still run when all have ended, or `seconds` later."""
    deadline, left = time.monotonic() + seconds, list(pids)
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [pid for pid in left if lives(pid)]
    return left
