"""What a watchdog would do to its process, written down instead."""

from __future__ import annotations

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
