"""Commands to the store that are cancelled."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from triptych.store.address import parse_store_url
from triptych.store.control import Control


class _LosesCancellations:
    """A pipeline like `asyncio.wait_for` of Python 3.11 whose result comes together with a cancel."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    def execute_command(self, *words: Any) -> None:
        pass

    async def execute(self, raise_on_error: bool) -> list[bytes]:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return [b"PONG"]
        raise AssertionError


async def test_a_cancellation_that_comes_together_with_the_reply_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    control = Control(parse_store_url("unix:///nowhere"), 5.0)
    pipeline = _LosesCancellations()
    monkeypatch.setattr(control._redis, "pipeline", lambda transaction: pipeline)
    asked = asyncio.create_task(control.execute("PING"))
    await pipeline.begun.wait()
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await control.close()
