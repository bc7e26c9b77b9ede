"""The processes of the measurement: PD workers without models, the proxy, and one that only receives."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triptych.base.delta import Delta
from triptych.base.machine.heap import collect_rarely
from triptych.base.metrics import ProxyMetrics
from triptych.base.rpc.channels import listen, make_channel, make_server
from triptych.base.types import ItemPlan, WorkerInfo
from triptych.pd_worker.core.request_events import EngineEvent
from triptych.pd_worker.events.streams import EventStreams
from triptych.protos import common_pb2, pd_pb2, pd_pb2_grpc
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.server import HttpServer, bind
from triptych.proxy.openai.app import make_app
from triptych.proxy.openai.chat.endpoint import ApiLimits
from triptych.proxy.pool import WorkerPool
from triptych.proxy.service import GrpcTransport
from triptych.registry.registry import RegistrySnapshot

MODEL = "bench"
_START_SECONDS = 60.0
#: Above the 10 ms from which on the proxy writes every token as it comes.
STEP_SECONDS = 0.0125
#: Steps between two looks for finished requests.
SWEEP_STEPS = 40


def pin(core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


class NoStore:
    """A store that holds nothing."""

    async def look_up(self, keys: Sequence[tuple[str, str]]) -> list[ItemPlan | None]:
        return [None for _ in keys]

    async def epoch(self) -> str:
        return "epoch"

    @property
    def clock_jumps(self) -> int:
        return 0


class FixedRegistry:
    """A registry with one PD worker."""

    def __init__(self, pd_address: str) -> None:
        self.infos = [WorkerInfo(pd_address, "pd", "i", "a" * 64, MODEL, (), {"max_num_seqs": 4096})]

    async def poll(self, proxy_id: str, term: float, *, mark: str) -> RegistrySnapshot:
        return RegistrySnapshot("fixed", "epoch", 1, None if mark else list(self.infos))


class ScriptedPD(pd_pb2_grpc.PDServiceServicer):
    """Waits for `streams` requests of a proxy, then sends one token of each in every message."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._waiting: defaultdict[str, list[pd_pb2.SubmitRequest]] = defaultdict(list)
        self._steps: defaultdict[str, asyncio.Queue[list[pd_pb2.StepEvents]]] = defaultdict(asyncio.Queue)

    async def Submit(self, request: pd_pb2.SubmitRequest, context: Any) -> pd_pb2.SubmitReply:
        proxy, waiting = request.proxy_id, self._waiting[request.proxy_id]
        waiting.append(request)
        if len(waiting) == self._streams:
            self._steps[proxy].put_nowait(_messages(self._waiting.pop(proxy)))
        return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_ADMITTED)

    async def Attach(self, request: pd_pb2.AttachRequest, context: Any) -> AsyncIterator[pd_pb2.StepEvents]:
        await context.send_initial_metadata(())
        while True:
            for step in await self._steps[request.proxy_id].get():
                yield step


def _messages(batch: Sequence[pd_pb2.SubmitRequest]) -> list[pd_pb2.StepEvents]:
    """The admissions, a step for every token, then the ends."""
    names, size, count = [request.request_id for request in batch], len(batch), batch[0].sampling.max_tokens
    admitted = pd_pb2.Admitted(prompt_token_ids=[1, 2, 3])
    end = pd_pb2.Finished(reason="length", prompt_tokens=3, completion_tokens=count)
    tokens = [
        pd_pb2.StepTokens(
            request_ids=names,
            attempts=[1] * size,
            positions=[at] * size,
            texts=[" token"] * size,
            token_ids=[1000 + at] * size,
        )
        for at in range(count)
    ]
    return [
        pd_pb2.StepEvents(
            events=[pd_pb2.RequestEvent(request_id=name, attempt=1, admitted=admitted) for name in names]
        ),
        *(pd_pb2.StepEvents(tokens=step) for step in tokens),
        pd_pb2.StepEvents(
            events=[pd_pb2.RequestEvent(request_id=name, attempt=1, finished=end) for name in names]
        ),
    ]


async def serve(worker: pd_pb2_grpc.PDServiceServicer) -> tuple[Any, int]:
    """A started server with the worker and health beside it, and its port."""
    server, state = make_server(), health.aio.HealthServicer()
    pd_pb2_grpc.add_PDServiceServicer_to_server(worker, server)
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    await state.set("i", health_pb2.HealthCheckResponse.SERVING)  # the incarnation that it is registered with
    port = listen(server, "127.0.0.1:0", mutual=True)
    await server.start()
    return server, port


class CountingPD(pd_pb2_grpc.PDServiceServicer):
    """A PD worker whose engine puts out a token of every running request in each step, and nothing else."""

    def __init__(self) -> None:
        self._streams = EventStreams(lambda ids, proxy_id: None)
        #: Requests with their output tokens so far.
        self._running: dict[str, tuple[pd_pb2.SubmitRequest, int]] = {}

    async def Submit(self, request: pd_pb2.SubmitRequest, context: Any) -> pd_pb2.SubmitReply:
        self._streams.open(request.proxy_id, request.request_id, request.attempt)
        self._running[request.request_id] = (request, 0)
        return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_ADMITTED)

    async def Attach(self, request: pd_pb2.AttachRequest, context: Any) -> AsyncIterator[pd_pb2.StepEvents]:
        await context.send_initial_metadata(())
        stream = self._streams.attach(
            request.proxy_id, request.requests, step_tokens=request.reads_step_tokens
        )
        while (message := await stream.next()) is not None:
            yield message

    async def run(self) -> None:
        """Steps until it is cancelled."""
        for number in count():
            await asyncio.sleep(STEP_SECONDS)
            events = [event for held in list(self._running.values()) for event in self._step(*held)]
            self._streams.deliver(events)
            if number % SWEEP_STEPS == 0:
                self._streams.sweep()

    def _step(self, request: pd_pb2.SubmitRequest, position: int) -> list[EngineEvent]:
        """One token; before the first one the admission, after the last one the end."""
        name, limit = request.request_id, request.sampling.max_tokens
        ids, attempt, proxy = (1000 + position,), request.attempt, request.proxy_id
        tokens: EngineEvent = Delta(" token", ids, (), 0, name, attempt, proxy, position)
        told = partial(pd_pb2.RequestEvent, request_id=name, attempt=attempt, proxy_id=proxy)
        self._running[name] = (request, position + 1)
        if position == 0:
            return [told(admitted=pd_pb2.Admitted(prompt_token_ids=(1, 2, 3))), tokens]
        if position + 1 < limit:
            return [tokens]
        del self._running[name]
        end = pd_pb2.Finished(reason="length", prompt_tokens=3, completion_tokens=limit)
        return [tokens, told(finished=end)]


def pd_process(pipe: Any, streams: int) -> None:
    """A scripted PD worker; sends its port."""

    async def run() -> None:
        server, port = await serve(ScriptedPD(streams))
        pipe.send(port)
        await server.wait_for_termination()

    pin(1)
    asyncio.run(run())


def counting_process(pipe: Any) -> None:
    """A counting PD worker; sends its port."""

    async def run() -> None:
        worker = CountingPD()
        _, port = await serve(worker)
        pipe.send(port)
        await worker.run()

    pin(1)
    asyncio.run(run())


def proxy_process(pipe: Connection, pd_port: int) -> None:
    """A proxy on the first core; sends its port, and answers everything with its CPU seconds so far."""

    async def run() -> None:
        metrics, pool = ProxyMetrics(), WorkerPool(FixedRegistry(f"127.0.0.1:{pd_port}"), "bench")
        transport = GrpcTransport(pool, "bench")
        dispatcher = Dispatcher(pool, NoStore(), metrics, transport, proxy_id="bench", max_queue=4096)
        listener = bind("127.0.0.1", 0)
        app = make_app(dispatcher, pool, metrics.registry, ApiLimits())
        await HttpServer(app, listener).start()
        await pool.start()
        collect_rarely()
        pipe.send(listener.getsockname()[1])
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(time.process_time())

    pin(0)
    uvloop.run(run())


@contextmanager
def children() -> Iterator[Callable[..., tuple[Connection, int]]]:
    """Starts processes, `start(target, *args)`: its pipe, and the first thing that it sends."""
    context = multiprocessing.get_context("spawn")
    started: list[SpawnProcess] = []

    def start(target: Callable[..., None], *args: object) -> tuple[Connection, int]:
        ours, theirs = context.Pipe()
        started.append(context.Process(target=target, args=(theirs, *args), daemon=True))
        started[-1].start()
        if not ours.poll(_START_SECONDS):
            raise RuntimeError(f"{target.__name__} did not start in {_START_SECONDS:g} s")
        return ours, ours.recv()

    try:
        yield start
    finally:
        for child in started:
            child.terminate()
            child.join()


def receive_process(pipe: Any, pd_port: int, streams: int) -> None:
    """Answers a number of tokens with the tokens per CPU second that gRPC alone lets through."""

    async def run() -> None:
        async with make_channel(f"127.0.0.1:{pd_port}") as channel:
            stub: Any = pd_pb2_grpc.PDServiceStub(channel)
            call = stub.Attach(pd_pb2.AttachRequest(proxy_id="receive", reads_step_tokens=True))
            steps = aiter(call)
            await call.initial_metadata()
            pipe.send("ready")
            while True:
                sampling = common_pb2.SamplingParams(max_tokens=await asyncio.to_thread(pipe.recv))
                started, seen = time.process_time(), 0
                for number in range(streams):
                    who: Any = {"request_id": f"{number:032d}", "attempt": 1, "proxy_id": "receive"}
                    await stub.Submit(pd_pb2.SubmitRequest(sampling=sampling, **who))
                async for step in steps:
                    seen += len(step.tokens.request_ids)
                    if step.events and step.events[0].HasField("finished"):
                        break
                pipe.send(seen / (time.process_time() - started))

    pin(0)
    uvloop.run(run())
