"""A client of the scaler that behaves as KEDA's operator and the HPA behind it do, in scaled time.

KEDA asks GetMetrics and then IsActive in every polling interval, and scales 0 -> 1 and to 0; a pushed `true`
scales at once, a pushed `false` does nothing. Between 1 and the most the HPA decides, which reads the metric
through KEDA. When the metric fails `failure_threshold` times in a row, `fallback` replicas hold.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpc import aio

from support.keda.hpa import SYNC, Behavior, PodAutoscaler
from support.keda.stubs import ScalerStub, message, scaled_object

#: Seconds before a stream that has ended is opened again: doubled after each error, up to the most.
STREAM_PAUSE, STREAM_PAUSE_MOST = 2.0, 60.0
#: KEDA puts the trigger's number before the metric's name, and takes it off before it asks.
PREFIX = "s0-"


class ScaleTarget(Protocol):
    """The Deployment that is scaled."""

    @property
    def replicas(self) -> int:
        """spec.replicas"""

    def scale(self, replicas: int) -> None: ...


@dataclass(frozen=True, slots=True)
class ScaledObject:
    """The fields of a ScaledObject that matter here, with KEDA's defaults; times in seconds."""

    metadata: Mapping[str, str]
    least: int = 0
    most: int = 100
    polling_interval: float = 30.0
    cooldown_period: float = 300.0
    behavior: Behavior = field(default_factory=Behavior)
    fallback: int | None = None
    failure_threshold: int = 3


class KedaOperator:
    """One ScaledObject's loops over one channel; all its times are divided by `speed`."""

    def __init__(self, spec: ScaledObject, target: ScaleTarget, channel: aio.Channel, speed: float) -> None:
        self.spec = spec
        self._target = target
        self._stub: Any = ScalerStub(channel)
        self._speed = speed
        self._hpa = PodAutoscaler(max(spec.least, 1), spec.most, spec.behavior)
        self._reference = scaled_object(spec.metadata)
        self._metric, self._per_pod = "", 1.0
        self._last_active: float | None = None
        #: Reads of the metric by the HPA that have failed in a row, and that have succeeded.
        self.failures, self.reads = 0, 0
        #: What was done, for a test to read: (scaled seconds, who, replicas).
        self.log: list[tuple[float, str, int]] = []
        #: Values that were pushed, in order.
        self.pushed: list[bool] = []
        #: Pauses before the stream was opened again.
        self.pauses: list[float] = []

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time() * self._speed

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[KedaOperator]:
        """All loops, until the block ends; an error in one of them is raised there."""
        await self._learn_metric()
        loops = [self._forever(self.spec.polling_interval, self.poll), self._forever(SYNC, self.sync)]
        tasks = [asyncio.create_task(loop) for loop in (*loops, self._follow())]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            for found in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(found, Exception):
                    raise found

    async def poll(self) -> None:
        """One round of KEDA's scale loop."""
        try:
            await self._total()
            active = (await self._stub.IsActive(self._reference, timeout=10.0)).result
        except aio.AioRpcError:
            if self.spec.fallback != 0:
                return  # an error scales nothing
            active = False  # but with a fallback of 0 replicas KEDA takes it for an inactive trigger
        self._request_scale(active)

    async def sync(self) -> None:
        """One look of the HPA."""
        try:
            total: float | None = await self._total()
            self.failures, self.reads = 0, self.reads + 1
        except aio.AioRpcError:
            self.failures += 1
            total = None
            if self.spec.fallback is not None and self.failures >= self.spec.failure_threshold:
                total = self.spec.fallback * self._per_pod
        current = self._target.replicas
        self._scale("hpa", self._hpa.replicas(self.now, current, total, self._per_pod))

    async def _learn_metric(self) -> None:
        (spec,) = (await self._stub.GetMetricSpec(self._reference, timeout=10.0)).metricSpecs
        self._metric = PREFIX + spec.metricName
        self._per_pod = spec.targetSizeFloat if spec.targetSizeFloat > 0 else float(spec.targetSize)

    async def _total(self) -> float:
        request = message("GetMetricsRequest")(
            scaledObjectRef=self._reference, metricName=self._metric.removeprefix(PREFIX)
        )
        (value,) = (await self._stub.GetMetrics(request, timeout=10.0)).metricValues
        return float(value.metricValueFloat if value.metricValueFloat > 0 else value.metricValue)

    async def _follow(self) -> None:
        pause = STREAM_PAUSE
        while True:
            try:
                async for pushed in self._stub.StreamIsActive(self._reference):
                    self.pushed.append(pushed.result)
                    if pushed.result:
                        self._request_scale(True)
                pause = STREAM_PAUSE
            except aio.AioRpcError:
                pass
            self.pauses.append(pause)
            await asyncio.sleep(pause / self._speed)
            pause = min(2 * pause, STREAM_PAUSE_MOST)

    def _request_scale(self, active: bool) -> None:
        current = self._target.replicas
        if active:
            if current == 0:
                self._scale("keda", max(self.spec.least, 1))
            self._last_active = self.now
        elif current > 0 and self.spec.least == 0:
            cooled = self._last_active is None or self._last_active + self.spec.cooldown_period < self.now
            if cooled:
                self._scale("keda", 0)
        elif current < self.spec.least:
            self._scale("keda", self.spec.least)

    def _scale(self, who: str, replicas: int) -> None:
        if replicas != self._target.replicas:
            self.log.append((self.now, who, replicas))
            self._target.scale(replicas)

    async def _forever(self, interval: float, work: Callable[[], Any]) -> None:
        while True:
            await work()
            await asyncio.sleep(interval / self._speed)
