"""Holding a cluster open at one stage of its requests' lives, to break it just there.

Every stage begins with all encoders stopped (SIGSTOP) until all requests with pictures have gathered, so that
none of them is over before the stage is reached. Nothing is killed in motion: the whole pool is stopped
first, then what is unfinished is counted by the proxy, which needs no worker for it, then one worker is
killed and the others go on. A stop of some seconds makes the proxy take the stopped for dead (health checks
and registrations last 5 s): their requests then go on elsewhere, or wait, and end as they should.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import redis

from support.chaos.streams import StageMissed, Streams
from support.data.traffic import Answer
from support.processes.cluster import PATIENCE, Cluster
from triptych.store import keys

#: Requests that must be unfinished when something is killed.
UNFINISHED = 25
#: Streams that must have shown a token, and not their last one, when a stream is broken.
IN_THE_MIDDLE = 5
#: Crowds of requests, one after the other, in which a stage is looked for.
TRIES = 4
#: Seconds that a pool runs between two looks at it: a few steps of an engine; part of an item of a tower, as
#: longer moments find all towers between two items too often.
MOMENTS = {"pd": 0.005, "colocated": 0.005, "encoder": 0.001}


async def hold(what: str, holds: Callable[[], Any], streams: Streams | None = None) -> None:
    """Waits for a stage without stopping the clients, which share this event loop.

    AssertionError at the end of the test's patience, and at once when one of `streams` has failed or all
    are over: then the stage will not come any more.
    """
    deadline = time.monotonic() + PATIENCE
    while not await asyncio.to_thread(holds):
        if streams is not None:
            streams.assert_under_way(what)
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s for: {what}"
        await asyncio.sleep(0.02)


def unfinished(cluster: Cluster) -> int:
    return int(cluster.total("proxy", "triptych_requests_in_flight"))


async def gathered(cluster: Cluster, streams: Streams, count: int = UNFINISHED) -> None:
    """Waits until `count` requests are under way."""
    await hold(f"{count} requests in flight", lambda: unfinished(cluster) >= count, streams)


def assert_unfinished(cluster: Cluster) -> None:
    """At least UNFINISHED requests are still under way."""
    left = unfinished(cluster)
    if left < UNFINISHED:
        raise StageMissed(f"{left} requests are unfinished, and the test wants {UNFINISHED}")


def _signal(cluster: Cluster, pool: str, number: int) -> None:
    for pid in cluster.pids(pool).values():
        with contextlib.suppress(ProcessLookupError):  # the one that was killed
            os.kill(pid, number)


@contextlib.contextmanager
def stopped(cluster: Cluster, pool: str) -> Iterator[None]:
    """All processes of the pool stand still; whatever happens, those that live go on afterwards."""
    _signal(cluster, pool, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(cluster, pool, signal.SIGCONT)


@contextlib.contextmanager
def _closed(gate: Path) -> Iterator[None]:
    gate.touch()
    try:
        yield
    finally:
        gate.unlink()


@contextlib.asynccontextmanager
async def caught(
    cluster: Cluster, streams: Streams, what: str, holds: Callable[[], Any], pool: str = "pd"
) -> AsyncIterator[None]:
    """Opens the gate, and stops the pool once `holds`.

    Until then its processes run for moments of MOMENTS seconds, between which they stand still and are looked
    at. In a cluster with `faults.gated` an engine computes at most once between two looks, however long a
    busy machine makes a moment: it cannot be beyond the stage when the stage is seen. `holds` asks no process
    of the pool.
    """
    deadline = time.monotonic() + PATIENCE
    gate = cluster.run_dir / f"{'encoder' if pool == 'encoder' else 'pd'}.gate"
    with stopped(cluster, pool), _closed(gate):
        if pool != "encoder":
            open_gate(cluster)
        while not await asyncio.to_thread(holds):
            streams.assert_under_way(what)
            assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s for: {what}"
            with gate.open("ab") as file:
                file.write(b".")
            _signal(cluster, pool, signal.SIGCONT)
            await asyncio.sleep(MOMENTS[pool])
            _signal(cluster, pool, signal.SIGSTOP)
            # What they have said reaches the others, which get ahead of them.
            await asyncio.sleep(0.1)
        yield


async def broken(
    ask: Callable[[int], Streams],
    gate: Callable[[], contextlib.AbstractContextManager[None]],
    kill: Callable[[Streams], Awaitable[None]],
) -> list[Answer]:
    """The answers of requests in which `kill` has found its stage and broken the cluster.

    `ask` makes the requests of a try, new to the cluster each time: those that are through the stage before
    it is seen are answered, and the next ones asked. `gate` is closed at the beginning of each try.
    """
    for number in range(TRIES):
        with gate():
            async with ask(number) as streams:
                try:
                    await kill(streams)
                except StageMissed:
                    if number == TRIES - 1:
                        raise
                    await streams.all()
                else:
                    return await streams.all()
    raise AssertionError("unreachable")


@contextlib.contextmanager
def closed_gate(cluster: Cluster) -> Iterator[None]:
    """Encoders stand still, and requests with pictures gather before them, until `open_gate` or the end."""
    for pool in ("encoder", "pd"):
        cluster.metrics(pool)  # a stopped worker cannot be looked up any more
    with stopped(cluster, "encoder"):
        yield


def open_gate(cluster: Cluster) -> None:
    _signal(cluster, "encoder", signal.SIGCONT)


async def _gather_all(cluster: Cluster, streams: Streams) -> None:
    await gathered(cluster, streams, streams.pictured)


async def kill_queued(cluster: Cluster, streams: Streams) -> None:
    """Items wait for encoders that have stopped."""
    await hold("items waiting", lambda: cluster.total("proxy", "triptych_waiting_items") > 0, streams)
    await _gather_all(cluster, streams)
    cluster.kill("encoder-0")
    open_gate(cluster)


def _leases(cluster: Cluster) -> dict[bytes, bytes | None]:
    """Items in a tower that are not stored yet, with its address; the store knows while encoders stand."""
    with redis.Redis.from_url(cluster.store_url, socket_timeout=PATIENCE) as client:
        leases = client.hgetall(keys.LEASES)
        return {
            item: lease.split(b"\n")[2]
            for item, lease in leases.items()
            if not client.exists(keys.embedding(item.decode()))
        }


async def kill_encoding(cluster: Cluster, streams: Streams) -> None:
    """Every tower has an item."""
    towers = len(cluster.pids("encoder"))
    await _gather_all(cluster, streams)
    before = await asyncio.to_thread(_leases, cluster)

    def at_work() -> bool:
        new = {item: owner for item, owner in _leases(cluster).items() if item not in before}
        return len(set(new.values())) == towers

    async with caught(cluster, streams, "all towers at work", at_work, "encoder"):
        assert_unfinished(cluster)
        assert cluster.total("proxy", "triptych_waiting_items"), "the encoders had nothing left to do"
        cluster.kill("encoder-0")


async def kill_saved(cluster: Cluster, streams: Streams) -> None:
    """Embeddings are in the store, and the PD workers that should load them have stopped."""

    def published() -> float:
        return cluster.total("proxy", "triptych_published_bytes")

    def saves() -> float:
        return cluster.total("encoder", "triptych_ec_save_seconds_count")

    def caught() -> bool:
        """Stops the PD workers while there is something that they have not loaded."""
        if not published():
            return False
        _signal(cluster, "pd", signal.SIGSTOP)
        if published():
            return True
        _signal(cluster, "pd", signal.SIGCONT)
        return False

    await _gather_all(cluster, streams)
    open_gate(cluster)
    try:
        await hold("embeddings that nobody has loaded", caught, streams)
        before = await asyncio.to_thread(saves)
        await hold(
            "one of them to be saved",
            lambda: saves() > before or not cluster.total("encoder", "triptych_encoder_inflight"),
            streams,
        )
        assert published(), "what was published is not there any more"
        assert_unfinished(cluster)
        cluster.kill("pd-0")
    finally:
        _signal(cluster, "pd", signal.SIGCONT)


async def kill_prefill(cluster: Cluster, streams: Streams) -> None:
    """Prompts with pictures are computed in chunks."""
    metric = "triptych_pd_chunked_prefills_total"
    await _gather_all(cluster, streams)
    before = await asyncio.to_thread(cluster.total, "pd", metric)
    open_gate(cluster)
    await hold("a prefill", lambda: cluster.total("pd", metric) > before, streams)
    with stopped(cluster, "pd"):
        assert_unfinished(cluster)
        cluster.kill("pd-0")


async def kill_midstream(cluster: Cluster, streams: Streams) -> None:
    """Tokens flow, and streams of requests with pictures are in their middle."""

    def flowing() -> bool:
        return streams.in_the_middle >= IN_THE_MIDDLE

    await _gather_all(cluster, streams)
    async with caught(cluster, streams, "streams in the middle", flowing):
        assert_unfinished(cluster)
        assert flowing()
        cluster.kill("pd-0")
