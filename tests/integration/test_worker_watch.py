"""A worker's health as its clients see it follows its engines; with its event loop it ends too."""

from __future__ import annotations

import contextlib
import functools
import queue
from collections.abc import AsyncIterator

from grpc_health.v1 import health_pb2, health_pb2_grpc

from support.beats import NoTimer
from support.probing import probe
from support.processes.cluster import wait_for
from support.waiting import until
from triptych.base.engine_beat import MIN_LIMIT, EngineBeat, Watchdog
from triptych.base.rpc.channels import make_channel, make_server
from triptych.base.status_server import ServiceStatus, status_server
from triptych.base.worker_process import Health, ProcessWatch

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Worker:
    """Health over gRPC, watched; what would end the process goes to `ends`."""

    def __init__(self) -> None:
        self.beat = EngineBeat("engine")
        self.ends: queue.Queue[str] = queue.Queue()
        self.server = make_server()
        self.health = Health(self.server)
        make = functools.partial(Watchdog, end=self.ends.put, timer=NoTimer())
        self.watch = ProcessWatch(self.health, [self.beat], MIN_LIMIT, make)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        await self.health.serving()
        channel = make_channel(f"127.0.0.1:{port}")
        self.stub = health_pb2_grpc.HealthStub(channel)
        try:
            async with self.watch:
                yield
        finally:
            await channel.close()
            await self.server.stop(None)

    async def shows(self, status: int, *, ticking: bool = False) -> None:
        """Waits until a health check says so."""
        last = 0
        while last != status:
            if ticking:
                self.beat.tick()
            last = (await self.stub.Check(health_pb2.HealthCheckRequest(), timeout=10)).status


async def test_health_follows_the_engines_beat_both_ways() -> None:
    worker = Worker()
    async with worker.serving():
        await worker.shows(SERVING, ticking=True)
        await worker.shows(NOT_SERVING)
        assert not worker.watch.healthy()
        await worker.shows(SERVING, ticking=True)
        assert worker.watch.healthy()


async def test_an_engine_that_dies_ends_the_process() -> None:
    worker = Worker()
    async with worker.serving():
        worker.beat.run(lambda: None)
        await until(lambda: not worker.ends.empty(), "the end of the process")
        assert worker.ends.get() == "the engine is dead"


async def test_an_event_loop_that_stands_still_fails_the_liveness_probe_and_ends_the_process() -> None:
    worker = Worker()
    status = ServiceStatus()
    with status_server("127.0.0.1", 0, status) as page:
        async with worker.serving():
            status.follow(worker.watch.healthy)
            status.ready()
            worker.beat.stop()
            assert probe(page.server_port, "/health")["code"] == 200
            # Blocks the loop until that is noticed.
            wait_for("the probe to fail", lambda: probe(page.server_port, "/health")["code"] == 503)
            assert probe(page.server_port, "/ready") == {"code": 503, "status": "stalled"}
            assert worker.ends.get(timeout=60).startswith("the event loop has stood still")


async def test_a_worker_that_leaves_stays_so_however_its_engine_beats() -> None:
    worker = Worker()
    async with worker.serving():
        await worker.health.leaving()
        await worker.health.serving()
        await worker.shows(NOT_SERVING, ticking=True)
