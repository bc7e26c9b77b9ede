"""A supervised process: whoever keeps a list of process ids is told of every change at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from support.waiting import until, within
from triptych.apps.launch.children import Child

_SLEEP = "import time; time.sleep(600)"


async def test_every_start_and_every_end_of_a_child_is_told():
    told: list[int | None] = []
    child = Child("pd-0", [sys.executable, "-c", _SLEEP], on_change=lambda: told.append(child.pid))
    watch = asyncio.create_task(child.watch())
    try:
        await until(lambda: len(told) == 1, "the first start")
        first = child.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(told) == 3, "the second start")
        second = child.pid
    finally:
        await child.end(grace=10.0)
        await within("the end of the watch", watch)
    assert told == [first, None, second, None]
    assert first != second
