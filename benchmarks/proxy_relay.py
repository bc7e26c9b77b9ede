"""How many tokens per second one proxy core relays, and what the proxy adds to a text request.

A PD worker in another process sends prepared messages as fast as the proxy takes them; clients in a third
process read the streams. The proxy's figure is tokens per second of its own CPU time: gRPC receive, state
machine, SSE rendering and the HTTP server's writes included.

    python -m benchmarks.proxy_relay [--streams 8] [--tokens 4000] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triptych.metrics import ProxyMetrics
from triptych.protos import common_pb2, pd_pb2, pd_pb2_grpc
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http_server import make_app
from triptych.proxy.pool import WorkerPool
from triptych.proxy.service import HttpServer, bind
from triptych.rpc import make_channel, make_server
from triptych.types import ItemPlan, WorkerInfo

RESULT = Path(__file__).parent / "results" / "proxy_relay.md"
MODEL = "bench"
TARGET = 80_000


class NoStore:
    """No item is ever asked for."""

    async def look_up(self, keys: Sequence[tuple[str, str]]) -> list[ItemPlan | None]:
        return [None for _ in keys]

    async def epoch(self) -> str:
        return "epoch"


class OneWorker:
    """A registry with one PD worker."""

    def __init__(self, address: str) -> None:
        self.info = WorkerInfo(address, "pd", "i", "a" * 64, MODEL, (), {"max_num_seqs": 4096})

    async def workers(self) -> list[WorkerInfo]:
        return [self.info]

    async def declare_proxy(self, proxy_id: str, term: float) -> None: ...

    async def proxies(self) -> int:
        return 1

    async def collect_dead(self, older_than: float = 600.0) -> int:
        return 0


class FastPD(pd_pb2_grpc.PDServiceServicer):
    """Waits for `streams` requests, then sends one token of each in every message."""

    def __init__(self, streams: int) -> None:
        self.streams = streams
        self.waiting: list[pd_pb2.SubmitRequest] = []
        self.arrived = asyncio.Event()

    async def Submit(self, request: pd_pb2.SubmitRequest, context: Any) -> pd_pb2.SubmitReply:
        self.waiting.append(request)
        self.arrived.set()
        return pd_pb2.SubmitReply(status=pd_pb2.SubmitReply.STATUS_ADMITTED)

    async def Attach(self, request: pd_pb2.AttachRequest, context: Any) -> AsyncIterator[pd_pb2.StepEvents]:
        await context.send_initial_metadata(())
        while True:
            await self.arrived.wait()
            self.arrived.clear()
            group = self.streams if self.waiting[0].sampling.max_tokens != 1 else 1
            if len(self.waiting) < group:
                continue
            batch, self.waiting = self.waiting[:group], self.waiting[group:]
            for step in _steps(batch):
                yield step

    async def Cancel(self, request: pd_pb2.CancelRequest, context: Any) -> Any:
        raise NotImplementedError


def _steps(batch: list[pd_pb2.SubmitRequest]) -> list[pd_pb2.StepEvents]:
    ids = [request.request_id for request in batch]
    count = batch[0].sampling.max_tokens
    steps = [_step(ids, admitted=pd_pb2.Admitted(prompt_token_ids=[1, 2, 3]))]
    steps += [
        _step(ids, tokens=pd_pb2.Tokens(position=at, token_ids=[1000 + at], text=" token"))
        for at in range(count)
    ]
    end = pd_pb2.Finished(reason="length", prompt_tokens=3, completion_tokens=count)
    return [*steps, _step(ids, finished=end)]


def _step(ids: list[str], **body: Any) -> pd_pb2.StepEvents:
    return pd_pb2.StepEvents(events=[pd_pb2.RequestEvent(request_id=name, attempt=1, **body) for name in ids])


def pd_process(pipe: Any, streams: int) -> None:
    async def serve() -> None:
        server = make_server()
        pd_pb2_grpc.add_PDServiceServicer_to_server(FastPD(streams), server)
        state = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(state, server)
        await state.set("", health_pb2.HealthCheckResponse.SERVING)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(port)
        await server.wait_for_termination()

    _pin(1)
    asyncio.run(serve())


def proxy_process(pipe: Any, pd_port: int) -> None:
    """Answers "cpu" with its CPU seconds so far."""

    async def serve() -> None:
        view = NoStore()
        metrics = ProxyMetrics()
        pool = WorkerPool(OneWorker(f"127.0.0.1:{pd_port}"), view, "bench")
        dispatcher = Dispatcher(pool, view, metrics, proxy_id="bench", max_queue=4096)
        listener = bind("127.0.0.1", 0)
        http = HttpServer(make_app(dispatcher, pool, metrics.registry), listener)
        await http.start()
        await pool.start()
        pipe.send(listener.getsockname()[1])
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(time.process_time())

    _pin(0)
    uvloop.run(serve())


def _pin(core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[core % len(cores)]})


async def ask(port: int, tokens: int) -> int:
    """Reads one streamed reply to its end; the number of its chunks."""
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": tokens,
            "stream": True,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    chunks, tail = 0, b""
    while b"[DONE]" not in tail:
        data = await reader.read(1 << 18)
        assert data, "the proxy closed the stream"
        chunks += data.count(b'"content":" token"')
        tail = (tail + data)[-64:]
    writer.close()
    return chunks


async def relay(port: int, pipe: Any, streams: int, tokens: int) -> tuple[float, float]:
    """(tokens per CPU second of the proxy, tokens per second of the clock)."""
    pipe.send("cpu")
    cpu, clock = pipe.recv(), time.perf_counter()
    counts = await asyncio.gather(*(ask(port, tokens) for _ in range(streams)))
    seconds = time.perf_counter() - clock
    pipe.send("cpu")
    used = pipe.recv() - cpu
    assert sum(counts) >= streams * tokens * 0.99, counts
    return streams * tokens / used, streams * tokens / seconds


async def receive_alone(pd_port: int, streams: int, tokens: int) -> float:
    """Tokens per CPU second of a reader that only takes the messages off the stream: what gRPC leaves."""
    channel = make_channel(f"127.0.0.1:{pd_port}")
    stub: Any = pd_pb2_grpc.PDServiceStub(channel)
    call = stub.Attach(pd_pb2.AttachRequest(proxy_id="receive"))
    await call.initial_metadata()
    sampling = common_pb2.SamplingParams(max_tokens=tokens)
    for name in range(streams):
        await stub.Submit(pd_pb2.SubmitRequest(request_id=f"{name:032d}", attempt=1, sampling=sampling))
    started, seen = time.process_time(), 0
    async for step in call:
        seen += len(step.events)
        if step.events[0].HasField("finished"):
            break
    used = time.process_time() - started
    call.cancel()
    await channel.close()
    return seen / used


def receive_process(pipe: Any, pd_port: int, streams: int, tokens: int) -> None:
    _pin(0)
    pipe.send(uvloop.run(receive_alone(pd_port, streams, tokens)))


async def latency(port: int, repeats: int = 200) -> list[float]:
    """Seconds of a one-token request from connect to the end, PD worker's two calls included."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        await ask(port, 1)
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(streams: int, tokens: int, rounds: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    pd_end, pd_pipe = context.Pipe()
    pd = context.Process(target=pd_process, args=(pd_pipe, streams), daemon=True)
    pd.start()
    pd_port = pd_end.recv()
    proxy_end, proxy_pipe = context.Pipe()
    proxy = context.Process(target=proxy_process, args=(proxy_pipe, pd_port), daemon=True)
    proxy.start()
    port = proxy_end.recv()
    _pin(1)
    try:
        time.sleep(1.0)
        asyncio.run(relay(port, proxy_end, streams, tokens // 4))
        runs = [asyncio.run(relay(port, proxy_end, streams, tokens)) for _ in range(rounds)]
        waits = asyncio.run(latency(port))
        proxy.terminate()
        proxy.join()
        raw_end, raw_pipe = context.Pipe()
        raw = context.Process(target=receive_process, args=(raw_pipe, pd_port, streams, tokens), daemon=True)
        raw.start()
        receive = raw_end.recv()
        raw.join()
    finally:
        proxy.terminate()
        pd.terminate()
        proxy.join()
        pd.join()
    return {
        "receive": receive,
        "cpu_median": statistics.median(run[0] for run in runs),
        "cpu_best": max(run[0] for run in runs),
        "clock_median": statistics.median(run[1] for run in runs),
        "latency_p50": statistics.median(waits),
        "latency_p99": statistics.quantiles(waits, n=100)[98],
    }


def chip() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0].split(":", 1)[1].strip() if names else platform.processor()


def report(found: dict[str, float], streams: int, tokens: int, rounds: int) -> str:
    verdict = "reached" if found["cpu_median"] >= TARGET else "not reached"
    return "\n".join(
        [
            "# Proxy relay",
            "",
            f"Command: `python -m benchmarks.proxy_relay --streams {streams} --tokens {tokens} "
            f"--rounds {rounds} --write`",
            f"Date: {datetime.date.today()}. Chip: {chip()}, {os.cpu_count()} cores. "
            f"Load at the end: {os.getloadavg()[0]:.1f}.",
            "",
            f"One message per step carries one token of each of {streams} streams; every token leaves as an",
            "SSE chunk. gRPC receive, state machine, rendering and HTTP writes are included.",
            "",
            "| figure | value |",
            "|---|---|",
            f"| tokens/s per core of proxy CPU time, median | {found['cpu_median']:,.0f} |",
            f"| tokens/s per core of proxy CPU time, best | {found['cpu_best']:,.0f} |",
            f"| gRPC receive alone, the same messages, same run | {found['receive']:,.0f} |",
            f"| tokens/s by the clock, all processes on this machine | {found['clock_median']:,.0f} |",
            f"| one-token text request through the proxy, p50 | {found['latency_p50'] * 1000:.2f} ms |",
            f"| one-token text request through the proxy, p99 | {found['latency_p99'] * 1000:.2f} ms |",
            "",
            f"Target: {TARGET:,} tokens/s per core, {verdict} by the median of this run. CPU time includes",
            "what other processes on the same cores cost in caches and context switches: compare it with the",
            "receive-alone figure of the same run, which runs none of the proxy's code.",
            "",
            "The latency is the whole time of a request on a new connection against a PD worker that answers",
            "at once: what the proxy adds, plus two gRPC hops and the client's own work.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the result file")
    options = parser.parse_args()
    shape = (options.streams, options.tokens, options.rounds)
    text = report(measure(*shape), *shape)
    sys.stdout.write(text)
    if options.write:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(text)


if __name__ == "__main__":
    main()
