"""The processes of the measurement: PD workers without models, the proxy, and one that only receives."""

from __future__ import annotations

import asyncio
import os
import time
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from benchmarks.proxy_relay.counting_pd import CountingPD
from triptych.config import TlsFiles
from triptych.protos import common_pb2, pd_pb2, pd_pb2_grpc
from triptych.rpc.channels import listen, make_channel, make_server
from triptych.rpc.tls.certificates import Certificates
from triptych.simulator.profile import proxy as profile
from triptych.simulator.profile.scripted_workers import serve_workers


def pin(core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


def pd_process(pipe: Any, streams: int, files: TlsFiles | None = None) -> None:
    async def serve() -> None:
        server, port = await serve_workers(streams, Certificates(files) if files else None)
        pipe.send(port)
        await server.wait_for_termination()

    pin(1)
    asyncio.run(serve())


def counting_process(pipe: Any) -> None:
    """Answers everything with its CPU seconds so far."""

    async def serve() -> None:
        server, worker, state = make_server(), CountingPD(), health.aio.HealthServicer()
        pd_pb2_grpc.add_PDServiceServicer_to_server(worker, server)
        health_pb2_grpc.add_HealthServicer_to_server(state, server)
        await state.set("", health_pb2.HealthCheckResponse.SERVING)
        pipe.send(listen(server, "127.0.0.1:0", mutual=True))
        await server.start()
        engine = asyncio.create_task(worker.run())
        while not engine.done():
            await asyncio.to_thread(pipe.recv)
            pipe.send(time.process_time())

    pin(1)
    asyncio.run(serve())


def proxy_process(pipe: Connection, pd_port: int, files: TlsFiles | None = None) -> None:
    """A proxy on the first core; answers every message with its CPU seconds so far."""
    pin(0)
    profile.proxy_process(pipe, pd_port, files=files)


class Direct:
    """A caller of the PD worker's own service, with a stream as a proxy has it."""

    def __init__(self, pd_port: int, name: str) -> None:
        self._name = name
        self._channel = make_channel(f"127.0.0.1:{pd_port}")
        self._stub: Any = pd_pb2_grpc.PDServiceStub(self._channel)
        self._call = self._stub.Attach(pd_pb2.AttachRequest(proxy_id=name, reads_step_tokens=True))
        self._steps = aiter(self._call)

    async def start(self) -> None:
        await self._call.initial_metadata()

    async def submit(self, tokens: int, number: int) -> None:
        sampling = common_pb2.SamplingParams(max_tokens=tokens)
        await self._stub.Submit(
            pd_pb2.SubmitRequest(
                request_id=f"{number:032d}", attempt=1, proxy_id=self._name, sampling=sampling
            )
        )

    async def read(self) -> int:
        """Takes messages up to the end of a request; the number of their events."""
        seen = 0
        async for step in self._steps:
            seen += len(step.tokens.request_ids)
            if step.events and step.events[0].HasField("finished"):
                return seen
        raise RuntimeError("the PD worker closed the stream")

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


def receive_process(pipe: Any, pd_port: int, streams: int) -> None:
    """Answers a number of tokens with the tokens per CPU second that gRPC alone lets through."""

    async def serve() -> None:
        direct = Direct(pd_port, "receive")
        await direct.start()
        pipe.send("ready")
        while True:
            tokens = await asyncio.to_thread(pipe.recv)
            started = time.process_time()
            for number in range(streams):
                await direct.submit(tokens, number)
            seen = await direct.read()
            pipe.send(seen / (time.process_time() - started))

    pin(0)
    uvloop.run(serve())
