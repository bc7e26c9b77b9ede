"""What a watchdog would do to its process, written down instead."""

from __future__ import annotations

import asyncio

import pytest

from triptych.base.engine_beat import HangTimer


class NoTimer(HangTimer):
    """Counts what it is asked for."""

    def __init__(self) -> None:
        self.wound: list[float] = []
        self.stops = 0

    def wind_up(self, seconds: float) -> None:
        self.wound.append(seconds)

    def stop(self) -> None:
        self.stops += 1


class StandingLoop:
    """The running event loop with a clock that jumps: to its watches it has stood still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.stood = asyncio.get_running_loop(), 0.0
        real = self.loop.time
        monkeypatch.setattr(self.loop, "time", lambda: real() + self.stood)

    def stand_still(self, seconds: float) -> None:
        self.stood += seconds

    async def turn(self, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(0)
