"""Regular work for a PD worker's event streams: beats to the proxies, removal of what nobody wants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from triptych.engine_beat import EngineBeat
from triptych.pd_worker.events.streams import EventStreams

#: How often proxies get the engine's beat, in seconds.
BEAT_SECONDS = 1.0
_SWEEP_SECONDS = 0.25
_POLL_SECONDS = 0.02


class StreamUpkeep:
    """Two tasks in the running event loop, from `start` to `stop`. `before_beat` is called with each beat."""

    def __init__(
        self, streams: EventStreams, beat: EngineBeat, before_beat: Callable[[], None] = lambda: None
    ) -> None:
        self._streams = streams
        self._beat = beat
        self._before_beat = before_beat
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._sweep(), name="sweep"),
            loop.create_task(self._send_beat(), name="beat"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def drain(self, grace: float) -> None:
        """Returns once no request is left, after at most `grace` seconds."""
        deadline = time.monotonic() + grace
        while not self._streams.idle and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self._streams.sweep()

    async def _send_beat(self) -> None:
        while True:
            self._before_beat()
            # The count of a dead engine does not advance.
            self._streams.beat(self._beat.count, self._beat.patience)
            await asyncio.sleep(BEAT_SECONDS)
