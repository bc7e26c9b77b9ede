"""How many tokens per second one proxy core relays, and what the proxy adds to a text request.

A PD worker in another process sends prepared messages as fast as the proxy takes them; clients in a third
process read the streams. The proxy's figure is tokens per second of its own CPU time (user and system, all
threads): gRPC receive, state machine, SSE rendering and the HTTP server's writes included. A process that
does nothing but receive the same messages takes turns with the proxy, round by round; and so do one-token
requests to the PD worker itself and through the proxy.

    python -m benchmarks.micro.proxy_relay [--streams 8] [--tokens 2000] [--rounds 15] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import multiprocessing
import os
import ssl
import statistics
import time
from typing import Any

import uvloop

from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.config import TlsFiles
from triptych.goodput.report.machine import chip, commit
from triptych.metrics import ProxyMetrics
from triptych.protos import common_pb2, pd_pb2, pd_pb2_grpc
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.server import HttpServer
from triptych.proxy.openai.app import make_app
from triptych.proxy.pool import WorkerPool
from triptych.proxy.service import bind, calm_gc
from triptych.proxy.transport import GrpcTransport
from triptych.rpc.channels import make_channel
from triptych.rpc.tls.certificates import Certificates
from triptych.simulator.profile.proxy import ask, post
from triptych.simulator.profile.scripted_workers import FixedRegistry, NoStore, serve_workers

RESULT = RESULTS / "proxy_relay.md"
TARGET = 80_000


def pd_process(pipe: Any, streams: int, files: TlsFiles | None = None) -> None:
    async def serve() -> None:
        server, port = await serve_workers(streams, Certificates(files) if files else None)
        pipe.send(port)
        await server.wait_for_termination()

    _pin(1)
    asyncio.run(serve())


def proxy_process(pipe: Any, pd_port: int, files: TlsFiles | None = None) -> None:
    """Answers "cpu" with its CPU seconds so far. With files, both its sides speak TLS."""

    async def serve() -> None:
        view = NoStore()
        metrics = ProxyMetrics()
        certificates = Certificates(files) if files else None
        pool = WorkerPool(FixedRegistry(f"127.0.0.1:{pd_port}"), "bench", certificates=certificates)
        dispatcher = Dispatcher(
            pool, view, metrics, GrpcTransport(pool, "bench"), proxy_id="bench", max_queue=4096
        )
        listener = bind("127.0.0.1", 0)
        app = make_app(dispatcher, pool, metrics.registry)
        http = HttpServer(app, listener, certificates=certificates)
        await http.start()
        await pool.start()
        calm_gc()
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


async def relay(
    port: int, pipe: Any, streams: int, tokens: int, context: ssl.SSLContext | None = None
) -> tuple[float, float]:
    """(tokens per CPU second of the proxy, tokens per second of the clock)."""
    pipe.send("cpu")
    cpu, clock = pipe.recv(), time.perf_counter()
    counts = await asyncio.gather(*(ask(port, post(tokens), context) for _ in range(streams)))
    seconds = time.perf_counter() - clock
    pipe.send("cpu")
    used = pipe.recv() - cpu
    assert counts == [tokens] * streams, counts
    return streams * tokens / used, streams * tokens / seconds


class Direct:
    """A caller of the PD worker's own service, with a stream as a proxy has it."""

    def __init__(self, pd_port: int, name: str) -> None:
        self._name = name
        self._channel = make_channel(f"127.0.0.1:{pd_port}")
        self._stub: Any = pd_pb2_grpc.PDServiceStub(self._channel)
        self._call = self._stub.Attach(pd_pb2.AttachRequest(proxy_id=name))
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
            seen += len(step.events)
            if step.events[0].HasField("finished"):
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

    _pin(0)
    uvloop.run(serve())


async def latency(port: int, pd_port: int, repeats: int = 300) -> tuple[list[float], list[float]]:
    """Seconds of one-token requests to the PD worker itself, and through the proxy; taking turns."""
    direct = Direct(pd_port, "latency")
    await direct.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    alone, proxied = [], []
    for number in range(repeats):
        started = time.perf_counter()
        await direct.submit(1, number)
        await direct.read()
        alone.append(time.perf_counter() - started)
        started = time.perf_counter()
        writer.write(post(1))
        await reader.readuntil(b"[DONE]")
        proxied.append(time.perf_counter() - started)
        await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    await direct.close()
    return alone, proxied


def measure(streams: int, tokens: int, rounds: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    children = []

    def start(target: Any, *args: Any) -> tuple[Any, Any]:
        ours, theirs = context.Pipe()
        children.append(context.Process(target=target, args=(theirs, *args), daemon=True))
        children[-1].start()
        return ours, ours.recv()

    try:
        _, pd_port = start(pd_process, streams)
        proxy, port = start(proxy_process, pd_port)
        receiver, _ = start(receive_process, pd_port, streams)
        _pin(1)
        time.sleep(1.0)
        runs, receive = [], []
        for number in range(rounds + 1):
            run = asyncio.run(relay(port, proxy, streams, tokens))
            receiver.send(tokens)
            alone = receiver.recv()
            if number:  # the first round is a warm-up
                runs.append(run)
                receive.append(alone)
        direct, proxied = asyncio.run(latency(port, pd_port))
    finally:
        for child in children:
            child.terminate()
            child.join()
    return {
        "receive": statistics.median(receive),
        "share": statistics.median(run[0] / alone for run, alone in zip(runs, receive, strict=True)),
        "cpu_median": statistics.median(run[0] for run in runs),
        "cpu_best": max(run[0] for run in runs),
        "clock_median": statistics.median(run[1] for run in runs),
        "direct_p50": statistics.median(direct),
        "direct_p99": statistics.quantiles(direct, n=100)[98],
        "proxied_p50": statistics.median(proxied),
        "proxied_p99": statistics.quantiles(proxied, n=100)[98],
    }


def report(found: dict[str, float], streams: int, tokens: int, rounds: int) -> str:
    verdict = "reached" if found["cpu_median"] >= TARGET else "not reached"
    added = found["proxied_p50"] - found["direct_p50"]
    return "\n".join(
        [
            "# Proxy relay",
            "",
            f"Command: `python -m benchmarks.micro.proxy_relay --streams {streams} --tokens {tokens} "
            f"--rounds {rounds} --write`",
            f"Date: {datetime.date.today()}. Commit: {commit()}. Chip: {chip()}, {os.cpu_count()} cores. "
            f"Load at the end: {os.getloadavg()[0]:.1f}.",
            "",
            f"One message per step carries one token of each of {streams} streams; every token leaves as an",
            "SSE chunk. gRPC receive, state machine, rendering and HTTP writes are included.",
            "",
            "| figure | value |",
            "|---|---|",
            f"| tokens per second of the proxy's CPU time (one core), median | {found['cpu_median']:,.0f} |",
            f"| the same, best round | {found['cpu_best']:,.0f} |",
            f"| gRPC receive alone, the same messages, median | {found['receive']:,.0f} |",
            f"| proxy over receive alone, median of the rounds | {found['share']:.2f} |",
            f"| tokens per second of the clock, on this machine | {found['clock_median']:,.0f} |",
            f"| one-token text request to the PD worker itself, p50 / p99 | "
            f"{found['direct_p50'] * 1000:.2f} / {found['direct_p99'] * 1000:.2f} ms |",
            f"| the same through the proxy, p50 / p99 | "
            f"{found['proxied_p50'] * 1000:.2f} / {found['proxied_p99'] * 1000:.2f} ms |",
            f"| latency that the proxy adds, difference of the medians | {added * 1000:.2f} ms |",
            "",
            f"Target: {TARGET:,} tokens/s per core, {verdict} by the median of this run. CPU time includes",
            "what other processes on the same cores cost in caches and context switches: compare it with the",
            "receive-alone figure, whose rounds alternate with the proxy's and run none of its code. A real",
            "PD worker merges the steps that a slow proxy has not taken yet into one message; this one not.",
            "",
            "Both one-token requests go over open connections and alternate: the difference is the HTTP",
            "server, the proxy's own work and one more process on the way.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=15)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    shape = (options.streams, options.tokens, options.rounds)
    text = report(measure(*shape), *shape)
    publish(text, RESULT, write=options.write)


if __name__ == "__main__":
    main()
