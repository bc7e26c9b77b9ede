"""CPU time of a proxy process per request, item, media byte and token; and the latency of one message."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import ssl
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.config import TlsFiles
from triptych.goodput.load.pictures import data_url, jpeg
from triptych.goodput.load.workload import Picture
from triptych.machine.heap import collect_rarely
from triptych.metrics import ProxyMetrics
from triptych.progress.progress import Progress, step
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.listener import bind
from triptych.proxy.http.server import HttpServer
from triptych.proxy.openai.app import ApiLimits, make_app
from triptych.proxy.pool import WorkerPool
from triptych.proxy.transport import GrpcTransport
from triptych.rpc.channels import make_channel
from triptych.rpc.tls.certificates import Certificates
from triptych.simulator.profile.fit import Sample
from triptych.simulator.profile.scripted_workers import MARK, MODEL, FixedRegistry, NoStore, serve_workers
from triptych.simulator.profile.timing import Effort, stage_left

#: Streams and tokens of the relay, requests of one measurement, and sides of the pictures (JPEGs of noise:
#: about 0.6 byte a pixel).
_STREAMS, _TOKENS = 8, 300
_REQUESTS = 24
_SIDES = (64, 1024, 256, 512)
_START_SECONDS = 60.0
_PINGS = 200


def worker_process(pipe: Connection, streams: int) -> None:
    """Both scripted workers; sends their port."""

    async def serve() -> None:
        server, port = await serve_workers(streams)
        pipe.send(port)
        await server.wait_for_termination()

    uvloop.run(serve())


def proxy_process(
    pipe: Connection, pd_port: int, encoder_port: int = 0, files: TlsFiles | None = None
) -> None:
    """A proxy before those workers; sends its port, and then for every message its CPU seconds so far.

    With files, both its sides speak TLS.
    """

    async def serve() -> None:
        view, metrics = NoStore(), ProxyMetrics()
        encoder = f"127.0.0.1:{encoder_port}" if encoder_port else ""
        certificates = Certificates(files) if files else None
        pool = WorkerPool(FixedRegistry(f"127.0.0.1:{pd_port}", encoder), "bench", certificates=certificates)
        dispatcher = Dispatcher(
            pool, view, metrics, GrpcTransport(pool, "bench"), proxy_id="bench", max_queue=4096
        )
        listener = bind("127.0.0.1", 0)
        app = make_app(dispatcher, pool, metrics.registry, ApiLimits())
        http = HttpServer(app, listener, certificates=certificates)
        await http.start()
        await pool.start()
        collect_rarely()
        pipe.send(listener.getsockname()[1])
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(time.process_time())

    uvloop.run(serve())


def post(tokens: int, pictures: Sequence[bytes] = ()) -> bytes:
    """A streamed chat request; `pictures` are data: URLs."""
    parts: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": url.decode()}} for url in pictures
    ]
    content: str | list[dict[str, object]] = [*parts, {"type": "text", "text": "x"}] if parts else "x"
    fields = {"model": MODEL, "max_tokens": tokens, "stream": True}
    body = json.dumps(fields | {"messages": [{"role": "user", "content": content}]}).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def ask(port: int, request: bytes, context: ssl.SSLContext | None = None) -> int:
    """Reads one streamed reply to its end; the number of its tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20, ssl=context)
    writer.write(request)
    chunks, tail = 0, b""
    while b"[DONE]" not in tail:
        data = tail + await reader.read(1 << 18)
        if len(data) == len(tail):
            raise RuntimeError(f"the proxy closed the stream after {tail!r}")
        chunks += data.count(MARK) - tail.count(MARK)
        tail = data[-64:]
    writer.close()
    return chunks


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


class ProxyBench:
    """Asks a proxy and reads its CPU time around that."""

    def __init__(self, pipe: Connection, port: int) -> None:
        self._pipe, self._port = pipe, port

    def cpu(self, requests: Sequence[bytes], at_once: int, tokens: int) -> float:
        """CPU seconds of the proxy for all `requests`, `at_once` of them in flight."""
        before = self._read()
        asyncio.run(self._ask(requests, at_once, tokens))
        return self._read() - before

    async def _ask(self, requests: Sequence[bytes], at_once: int, tokens: int) -> None:
        for first in range(0, len(requests), at_once):
            batch = requests[first : first + at_once]
            counts = await asyncio.gather(*(ask(self._port, request) for request in batch))
            if counts != [tokens] * len(batch):
                raise RuntimeError(f"{counts} tokens came, not {tokens} of each")

    def _read(self) -> float:
        self._pipe.send("cpu")
        return float(self._pipe.recv())


def proxy_samples(effort: Effort) -> tuple[list[Sample], list[float]]:
    """(samples per request, seconds of every round trip of an empty call)."""
    with children() as start:
        _, workers = start(worker_process, _STREAMS)
        pipe, port = start(proxy_process, workers, workers)
        bench = ProxyBench(pipe, port)
        trips = asyncio.run(round_trips(workers))
        with step("the proxy and its messages", effort.repeats + 1, "turns") as running:
            return _measured(bench, effort, running), trips


def _measured(bench: ProxyBench, effort: Effort, running: Progress) -> list[Sample]:
    began = time.perf_counter()
    streams = [post(_TOKENS)] * _STREAMS
    short = [post(1)] * _REQUESTS
    # Work, requests at once, tokens of each; pictures differ, so that every one is hashed and sent.
    found: dict[int, tuple[dict[str, float], list[float]]] = {}
    seed = 0
    for turn in range(effort.repeats + 1):
        rounds: list[tuple[dict[str, float], list[bytes], int, int]] = [
            (_terms(0, 0, _TOKENS), streams, _STREAMS, _TOKENS),
            (_terms(0, 0, 1), short, 4, 1),
        ]
        for side in _SIDES:
            for count in (1, 3):
                seed += 1
                pictures = [Picture(1000 * seed + index, side, side) for index in range(count * 4)]
                urls = [data_url(picture) for picture in pictures]
                requests = [post(1, urls[at::4]) for at in range(4)]
                nbytes = sum(len(jpeg(picture)) for picture in pictures) / 4
                rounds.append((_terms(count, nbytes, 1), requests, 4, 1))
        for index, (terms, requests, at_once, tokens) in enumerate(rounds):
            seconds = bench.cpu(requests, at_once, tokens) / len(requests)
            if turn:
                found.setdefault(index, (terms, []))[1].append(seconds)
        seconds = time.perf_counter() - began
        running.advance(left=stage_left(seconds, (turn + 1) / (effort.repeats + 1), effort))
        if turn and seconds > effort.stage_seconds:
            break
    return [Sample(terms, statistics.median(taken), tuple(taken)) for terms, taken in found.values()]


def _terms(items: int, nbytes: float, tokens: int) -> dict[str, float]:
    return {"request": 1, "item": items, "media_byte": nbytes, "token": tokens}


async def round_trips(port: int, count: int = _PINGS) -> list[float]:
    """Seconds of calls that carry nothing, one after another."""
    channel = make_channel(f"127.0.0.1:{port}")
    stub = health_pb2_grpc.HealthStub(channel)
    found: list[float] = []
    try:
        for _ in range(count + 10):
            began = time.perf_counter()
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
            found.append(time.perf_counter() - began)
    finally:
        await channel.close()
    return found[10:]
