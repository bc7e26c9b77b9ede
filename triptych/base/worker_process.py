"""The parts of every process that serves gRPC: checks, health service, watchdog, stop signal."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc
import msgspec
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triptych.base.config import (
    WorkerConfig,
    check_advertise,
    check_bind,
    check_drain_timeout,
)
from triptych.base.engine_beat import EngineBeat, Watchdog, check_stall_timeout
from triptych.base.machine.worker_load import LOAD_HEADER, WorkerLoad
from triptych.base.rpc.channels import STORE_SERVICE
from triptych.base.tracing.start import check_tracing


def stop_signal() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets; belongs to the running event loop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def check_worker(config: WorkerConfig) -> None:
    """ConfigError, naming the flag, for a worker that cannot serve as configured; called before it starts."""
    check_bind(config.host, config.internal_token)
    check_stall_timeout(config.stall_timeout)
    check_drain_timeout(config.drain_timeout)
    check_tracing(config)
    if config.advertise:
        check_advertise(config.advertise)


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # it has no types
    """gRPC's own, with the load of a registration behind the answer for its incarnation."""

    def __init__(self, loads: Mapping[str, Callable[[], WorkerLoad]]) -> None:
        super().__init__()
        self._loads = loads

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> health_pb2.HealthCheckResponse:
        if (load := self._loads.get(request.service)) is not None:
            context.set_trailing_metadata(((LOAD_HEADER, msgspec.json.encode(load())),))
        return await super().Check(request, context)

    async def List(
        self, request: health_pb2.HealthListRequest, context: aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthListResponse:
        """Refused: it would tell incarnations, and left out it is a traceback in the log for each call."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "use Check: this server lists no services")
        raise AssertionError("unreachable")


class Health:
    """The gRPC health service of a worker or proxy: SERVING from `serving` until `stalled` or `leaving`."""

    def __init__(self, server: aio.Server) -> None:
        #: By the incarnation of a registration, which nobody knows who does not read the registry.
        self.loads: dict[str, Callable[[], WorkerLoad]] = {}
        self._servicer = HealthServicer(self.loads)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        #: Services that it answers for: the process, and by its incarnation each registration of a worker, so
        #: that a proxy does not take another process at the address for it.
        self.services = {""}

    async def serving(self) -> None:
        await self._set_all(health_pb2.HealthCheckResponse.SERVING)

    async def stalled(self) -> None:
        """Proxies send no new requests, until `serving`: an engine stands still."""
        await self._set_all(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _set_all(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in self.services:
            await self._servicer.set(service, status)

    async def reaches_store(self, reaches: bool) -> None:
        """Proxies send no work to this process that needs the embedding store while it `reaches` none."""
        status = health_pb2.HealthCheckResponse
        await self._servicer.set(STORE_SERVICE, status.SERVING if reaches else status.NOT_SERVING)

    async def leaving(self) -> None:
        """Proxies send no new requests from now on; they still see a live worker."""
        await self._servicer.enter_graceful_shutdown()


class ProcessWatch:
    """A watch over a process's engines and its event loop, inside `async with`, for the running event loop.

    The health service follows them, and the process ends with the first of them. It follows `serves`, too:
    whether another process, which this one cannot do without, is there.
    """

    def __init__(
        self,
        health: Health,
        engines: Sequence[EngineBeat],
        stall_timeout: float,
        make_watchdog: Callable[[Sequence[EngineBeat], float], Watchdog] = Watchdog,
        serves: Callable[[], bool] = lambda: True,
    ) -> None:
        self._health = health
        self._loop = EngineBeat("event loop")
        self._watchdog = make_watchdog((*engines, self._loop), stall_timeout)
        self._serves = serves
        self._task: asyncio.Task[None] | None = None

    def alive(self) -> bool:
        """Whether all of them have made progress lately."""
        return self._watchdog.healthy

    def healthy(self) -> bool:
        """Whether they have, and new requests can be served."""
        return self.alive() and self._serves()

    async def __aenter__(self) -> ProcessWatch:
        self._watchdog.start()
        self._task = asyncio.create_task(self._follow(), name="watch")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._watchdog.stop)

    async def _follow(self) -> None:
        last = True
        while True:
            self._loop.tick()
            if (healthy := self.healthy()) is not last:
                last = healthy
                await (self._health.serving() if healthy else self._health.stalled())
            await asyncio.sleep(self._watchdog.interval)
