"""CPU time of a proxy process per request, item, media byte and token, and the latency of one message."""

from __future__ import annotations

import asyncio
import time

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from triptych.base.config import WorkerCounts
from triptych.base.errors import ConfigError
from triptych.base.progress import Progress
from triptych.base.rpc.channels import listen, make_channel, make_server
from triptych_bench.goodput.launch import find_model, launched
from triptych_bench.goodput.load.generator import generate
from triptych_bench.goodput.load.job import LoadJob, Target
from triptych_bench.goodput.load.payload import jpeg
from triptych_bench.goodput.load.workload import Picture, PlannedRequest
from triptych_bench.simulator.profile.fit import Effort, Sample, sample_of, stage_left

#: Streams and tokens of the relay, requests of one measurement, and sides of the pictures (JPEGs of noise:
#: about 0.6 byte a pixel).
_STREAMS, _TOKENS, _REQUESTS, _SIDES = 8, 300, 24, (64, 1024, 256, 512)
_PINGS, _IDLE_SECONDS = 200, 1.0


class ProxyBench:
    """Sends requests to a cluster, and reads its proxy's CPU time before and after; idle work is left out."""

    def __init__(self, url: str, pid: int) -> None:
        self._target = find_model(Target(url, ""))
        #: Linux' clock of another process's CPU time.
        self._clock = (~pid << 3) | 2
        before = time.clock_gettime(self._clock)
        time.sleep(_IDLE_SECONDS)
        self._idle = (time.clock_gettime(self._clock) - before) / _IDLE_SECONDS

    def cpu(self, requests: list[PlannedRequest], at_once: int) -> float:
        """CPU seconds of the proxy for one of the `requests`, `at_once` of them in flight."""
        job = LoadJob(self._target, tuple((0.0, request) for request in requests), concurrency=at_once)
        before, began = time.clock_gettime(self._clock), time.perf_counter()
        report = asyncio.run(generate(job, lambda progress: None))
        spent, wall = time.clock_gettime(self._clock) - before, time.perf_counter() - began
        if failed := [record.error for record in report.records if not record.ok]:
            raise ConfigError(f"the demo cluster did not answer: {failed[0]}")
        return max(spent - self._idle * wall, 1e-6) / len(requests)


def proxy_samples(effort: Effort) -> tuple[list[Sample], list[float]]:
    """(samples per request, seconds of every round trip of an empty call), with the demo model behind it."""
    result: dict[int, tuple[dict[str, float], list[float]]] = {}
    flags = ("--device", "cpu", "--log-level", "warning")
    turns = effort.repeats + 1
    with Progress("the proxy and its messages", turns, "turns") as running:
        with launched(WorkerCounts(encoders=1, pd_workers=1), "", flags) as cluster:
            bench = ProxyBench(cluster.url, cluster.processes["proxy"])
            began = time.perf_counter()
            for turn in range(turns):
                for index, (terms, requests, at_once) in enumerate(_rounds(turn)):
                    seconds = bench.cpu(requests, at_once)
                    # The first turn warms up.
                    if turn:
                        result.setdefault(index, (terms, []))[1].append(seconds)
                spent = time.perf_counter() - began
                running.advance(left=stage_left(spent, (turn + 1) / turns, effort))
                if turn and spent > effort.stage_seconds:
                    break
        trips = asyncio.run(round_trips())
    return [sample_of(terms, taken) for terms, taken in result.values()], trips


def _rounds(turn: int) -> list[tuple[dict[str, float], list[PlannedRequest], int]]:
    """(terms of a request, requests, how many at once); pictures differ: each is hashed and sent."""

    def asked(count: int, tokens: int, pictures: int = 0, side: int = 0) -> list[PlannedRequest]:
        seed = 1_000_000 * turn + 1000 * side + 100 * pictures
        made = range(0, 4 * count, 4)
        shown = [tuple(Picture(seed + at + n, side, side) for n in range(pictures)) for at in made]
        return [PlannedRequest(seed + at, 8, tokens, each) for at, each in enumerate(shown)]

    rounds = [
        (_terms(0, 0, _TOKENS), asked(_STREAMS, _TOKENS), _STREAMS),
        (_terms(0, 0, 1), asked(_REQUESTS, 1), 4),
    ]
    for side in _SIDES:
        for count in (1, 3):
            requests = asked(4, 1, count, side)
            nbytes = sum(len(jpeg(picture)) for request in requests for picture in request.pictures) / 4
            rounds.append((_terms(count, nbytes, 1), requests, 4))
    return rounds


def _terms(items: int, nbytes: float, tokens: int) -> dict[str, float]:
    return {"request": 1, "item": items, "media_byte": nbytes, "token": tokens}


async def round_trips(count: int = _PINGS) -> list[float]:
    """Seconds of calls that carry nothing, one after another, to a server of this process."""
    server, state = make_server(), health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(state, server)
    await state.set("", health_pb2.HealthCheckResponse.SERVING)
    port = listen(server, "127.0.0.1:0", mutual=True)
    await server.start()
    result: list[float] = []
    async with make_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(count + 10):
            began = time.perf_counter()
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=5.0)
            result.append(time.perf_counter() - began)
    await server.stop(0)
    return result[10:]
