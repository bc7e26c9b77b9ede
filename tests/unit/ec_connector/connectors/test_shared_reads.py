"""Reads of an embedding out of another process's shared memory."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from triptych.ec_connector.connectors import direct_path


async def test_a_cancelled_read_of_shared_memory_ends_after_its_thread(monkeypatch):
    began, told = threading.Event(), []

    def read(name: str, value: str, item: object, stop: threading.Event) -> None:
        began.set()
        told.append(stop.wait(20.0))

    monkeypatch.setattr(direct_path, "_read_segment", read)
    loads: Any = object.__new__(direct_path.DirectLoads)
    reading = asyncio.create_task(loads._read_shared("segment", "value", None, direct_path._SMALL_BYTES))
    assert await asyncio.to_thread(began.wait, 20.0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert told == [True]
