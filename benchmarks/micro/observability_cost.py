"""What live data and traces cost the proxy: CPU time of a text request, without them and with each.

Proxies of one machine that differ in nothing else take turns, in an order that goes round: every round asks
each for the same number of short streamed answers, from a PD worker whose engine only counts. A proxy's
figure is its own CPU time, user and system, of all threads, so that what is done once a second and the
export of spans are in it. Ratios are within a round, to the proxy without live data and traces.

    python -m benchmarks observability_cost [--rounds 20] [--clients 64] [--each 10] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import uvloop

from benchmarks.proxy_relay.clients import SHORT, cpu_seconds, served
from benchmarks.proxy_relay.counting_pd import STEP_SECONDS
from benchmarks.proxy_relay.processes import counting_process, pin
from benchmarks.result_page import RESULTS, add_write_flag, publish
from triptych.config import ProxyConfig
from triptych.goodput.report.machine import chip, commit
from triptych.machine.heap import collect_rarely
from triptych.metrics import ProxyMetrics
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.listener import bind
from triptych.proxy.http.server import HttpServer
from triptych.proxy.live.service import LiveData
from triptych.proxy.openai.app import ApiLimits, make_app
from triptych.proxy.pool import WorkerPool
from triptych.proxy.transport import GrpcTransport
from triptych.simulator.profile.proxy import children
from triptych.simulator.profile.scripted_workers import FixedRegistry, NoStore
from triptych.tracing.start import start_tracer

T = TypeVar("T")

RESULT = RESULTS / "observability_cost.md"
#: Seconds over which idle proxies are measured.
IDLE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Mode:
    """What one proxy has, and how many listeners follow its live data."""

    name: str
    live: bool = True
    listeners: int = 0
    sample: float | None = None


MODES = (
    Mode("neither (`--no-page`)", live=False),
    Mode("live data, nobody looks (the default)"),
    Mode("live data, one listener", listeners=1),
    Mode("live data, and traces at 0.01", sample=0.01),
    Mode("live data, and traces at 1.0", sample=1.0),
)


@dataclass
class Runs:
    """What the rounds of one proxy have shown, in seconds."""

    cpu: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    #: Of the proxy's CPU for each second in which nothing is asked.
    idle: float = 0.0


def proxy_process(pipe: Connection, pd_port: int, mode: Mode, collector: str) -> None:
    """A proxy on the first core; sends its port, and its CPU seconds so far for every message."""
    pin(0)
    uvloop.run(_serve(pipe, pd_port, mode, collector))


async def _serve(pipe: Connection, pd_port: int, mode: Mode, collector: str) -> None:
    sample = {} if mode.sample is None else {"otlp_endpoint": collector, "trace_sample": mode.sample}
    config = ProxyConfig(**sample)  # type: ignore[arg-type]
    metrics, store = ProxyMetrics(), NoStore()
    # The PD worker tells its proxies apart by this id.
    proxy_id = f"proxy-{MODES.index(mode)}"
    pool = WorkerPool(FixedRegistry(f"127.0.0.1:{pd_port}", ""), proxy_id)
    live = LiveData(config, pool) if mode.live else None
    dispatcher = Dispatcher(
        pool,
        store,
        metrics,
        GrpcTransport(pool, proxy_id),
        proxy_id=proxy_id,
        max_queue=4096,
        observer=None if live is None else live.calls,
    )
    listener = bind("127.0.0.1", 0)
    await pool.start()
    routes = () if live is None else live.start(dispatcher, metrics, proxy_id)
    tracer = start_tracer(config, "proxy", proxy_id)
    app = make_app(
        dispatcher, pool, metrics.registry, ApiLimits(), page=mode.live, live=routes, tracer=tracer
    )
    await HttpServer(app, listener).start()
    collect_rarely()
    pipe.send(listener.getsockname()[1])
    while True:
        await asyncio.to_thread(pipe.recv)
        pipe.send(time.process_time())


def collector_process(pipe: Connection) -> None:
    """An OTLP collector that takes everything and keeps the number of bytes; sends its port first."""
    pin(1)
    uvloop.run(_collect(pipe))


async def _collect(pipe: Connection) -> None:
    taken = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
                taken += len(await reader.readexactly(length))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    while True:
        await asyncio.to_thread(pipe.recv)
        pipe.send(taken)


@contextlib.asynccontextmanager
async def listening(port: int, count: int) -> AsyncIterator[None]:
    """Listeners of /cluster/events, each of which has had its first events."""

    async def drain(reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 16):
            pass

    readers, writers = [], []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        writer.write(b"GET /cluster/events HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"event: snapshot")
        readers.append(asyncio.create_task(drain(reader)))
        writers.append(writer)
    try:
        yield
    finally:
        for task, writer in zip(readers, writers, strict=True):
            task.cancel()
            writer.close()


async def asked(port: int, proxy: Any, mode: Mode, clients: int, each: int) -> tuple[float, float]:
    """CPU seconds of a request, and requests per second of the clock."""
    async with listening(port, mode.listeners):
        began = time.perf_counter()
        cpu = await served(port, proxy, stream=True, clients=clients, each=each)
        return cpu, clients * each / (time.perf_counter() - began)


async def idle(port: int, proxy: Any, mode: Mode) -> float:
    """CPU seconds of the proxy for each second in which nothing is asked."""
    async with listening(port, mode.listeners):
        before, began = cpu_seconds(proxy), time.perf_counter()
        await asyncio.sleep(IDLE_SECONDS)
        return (cpu_seconds(proxy) - before) / (time.perf_counter() - began)


def measure(rounds: int, clients: int, each: int) -> tuple[dict[str, Runs], int]:
    """The rounds of every mode, and the bytes of spans that the collector has taken."""
    found = {mode.name: Runs() for mode in MODES}
    with children() as start:
        _, pd_port = start(counting_process)
        collector, collector_port = start(collector_process)
        url = f"http://127.0.0.1:{collector_port}"
        proxies = [start(proxy_process, pd_port, mode, url) for mode in MODES]
        pin(1)
        time.sleep(1.0)
        for number in range(rounds + 1):
            for mode, (pipe, port) in rotated(list(zip(MODES, proxies, strict=True)), number):
                cpu, rate = asyncio.run(asked(port, pipe, mode, clients, each))
                if number:  # the first round is a warm-up
                    found[mode.name].cpu.append(cpu)
                    found[mode.name].rate.append(rate)
        for mode, (pipe, port) in zip(MODES, proxies, strict=True):
            found[mode.name].idle = asyncio.run(idle(port, pipe, mode))
        collector.send("bytes")
        return found, int(collector.recv())


def rotated(items: list[T], turn: int) -> list[T]:
    """The items from another one on in every turn."""
    first = turn % len(items)
    return items[first:] + items[:first]


def ratios(runs: Runs, plain: Runs) -> tuple[float, float, float]:
    """Median, least and largest of a proxy's CPU time over the plain one's, round by round."""
    each = [cpu / other for cpu, other in zip(runs.cpu, plain.cpu, strict=True)]
    return statistics.median(each), min(each), max(each)


def rows(found: dict[str, Runs]) -> Sequence[tuple[str, ...]]:
    plain = found[MODES[0].name]
    shown = []
    for name, runs in found.items():
        median, least, most = ratios(runs, plain)
        cpu = statistics.median(runs.cpu)
        ratio = "1" if runs is plain else f"{median:.3f} ({least:.2f} to {most:.2f})"
        shown.append(
            (
                name,
                f"{cpu * 1e6:,.0f} µs",
                f"{1 / cpu:,.0f}",
                ratio,
                f"{statistics.median(runs.rate):,.0f}",
                f"{runs.idle * 1000:.1f} ms",
            )
        )
    return shown


def report(found: dict[str, Runs], nbytes: int, shape: tuple[int, int, int]) -> str:
    rounds, clients, each = shape
    head = ("proxy", "CPU a request", "requests/s a core", "CPU over the first", "requests/s", "idle, each s")
    return "\n".join(
        [
            "# Cost of live data and traces",
            "",
            f"Command: `python -m benchmarks observability_cost --rounds {rounds} --clients {clients} "
            f"--each {each} --write`",
            f"Date: {datetime.date.today()}. Commit: {commit()}. Chip: {chip()}, {os.cpu_count()} cores. "
            f"Load at the end: {os.getloadavg()[0]:.1f}.",
            "",
            f"Text requests of {SHORT} streamed tokens: {clients} clients, each over one connection, ask",
            f"{each} times in each of {rounds} rounds, in which the proxies take turns. A PD worker without",
            f"a model puts out a token of each request every {STEP_SECONDS * 1000:g} ms. All CPU time of a",
            "proxy's process counts: what it does once a second and the thread that sends spans, too.",
            "",
            f"| {' | '.join(head)} |",
            f"|{'---|' * len(head)}",
            *(f"| {' | '.join(row)} |" for row in rows(found)),
            "",
            "Ratios are within rounds: median (least to largest). The requests/s of the clock are bounded",
            "by the core of the clients, the PD worker and the collector, which all proxies share; the",
            f"collector took {nbytes / 1e6:.1f} MB of spans.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--each", type=int, default=10)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    shape = (options.rounds, options.clients, options.each)
    publish(report(*measure(*shape), shape), RESULT, write=options.write)


if __name__ == "__main__":
    main()
