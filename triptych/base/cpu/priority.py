"""Whose processes get the cores first."""

from __future__ import annotations

import contextlib
import os

#: A third of a core's time beside one process that stands before.
BEHIND = 5


def put_behind(pid: int) -> None:
    """Has a process that works for one request get the cores after this one, which works for all of them.

    It loses nothing where cores are idle.
    """
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, pid, min(os.getpriority(os.PRIO_PROCESS, 0) + BEHIND, 19))
