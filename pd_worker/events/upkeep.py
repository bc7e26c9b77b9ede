"""Regular work for a PD worker's event streams: beats to the proxies, removal of abandoned requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client import Counter, Gauge

from triptych.base.engine_beat import EngineBeat
from triptych.base.metrics import PDMetrics
from triptych.pd_worker.events.streams import EventStreams
from triptych.protos import pd_pb2

#: How often proxies get the engine's beat, in seconds.
BEAT_SECONDS = 1.0
_SWEEP_SECONDS = 0.25
_POLL_SECONDS = 0.02


class StreamUpkeep:
    """Two tasks in the running event loop, from `start` to `stop`. `load` is asked for each beat."""

    def __init__(self, streams: EventStreams, beat: EngineBeat, load: Callable[[], pd_pb2.PDLoad]) -> None:
        self._streams = streams
        self._beat = beat
        self._load = load
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
            # The count of a dead engine does not advance.
            self._streams.beat(self._beat.count, self._beat.patience, self._load())
            await asyncio.sleep(BEAT_SECONDS)


def load_report(metrics: PDMetrics, encoder_cache_bytes: int) -> pd_pb2.PDLoad:
    """The load now; `encoder_cache_bytes` is the encoder cache's size."""
    return pd_pb2.PDLoad(
        running=int(_value(metrics.requests_running)),
        waiting=int(_value(metrics.requests_waiting)),
        kv_usage=_value(metrics.kv_cache_usage),
        cache_usage=_value(metrics.encoder_cache_bytes) / max(encoder_cache_bytes, 1),
        generated_tokens=int(_value(metrics.generation_tokens)),
    )


def _value(metric: Counter | Gauge) -> float:
    """The value of a metric without labels of its own. Once a second: nothing is added to a step."""
    return next(sample.value for family in metric.collect() for sample in family.samples)
