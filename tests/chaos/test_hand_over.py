"""Workers are killed, or the store loses KV, while requests go from prefill to decode workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from support.chaos import stages
from support.chaos.rest import assert_at_rest
from support.chaos.streams import Streams
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS, Case
from support.processes.cluster import PATIENCE, Cluster, running_cluster, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROLES = ("--prefill-workers", "1", "--decode-workers", "2", "--prefill-threshold", "0", "--threads", "1")


def hand_overs(cluster: Cluster) -> float:
    return cluster.total("proxy", "triptych_hand_overs_total")


async def kill_at_work(cluster: Cluster, name: str, streams: Streams) -> None:
    """Kills a PD worker that has requests: all of them stand still while the proxy says so."""
    while True:
        with stages.stopped(cluster, "pd"):
            if await asyncio.to_thread(requests_of, cluster, name):
                cluster.kill(name)
                return
        streams.assert_under_way(f"requests at {name}")
        await asyncio.sleep(0.1)  # some steps further


def requests_of(cluster: Cluster, name: str) -> int:
    """The requests that a PD worker has, as the proxy sees it from now on."""
    began = time.time()

    def row() -> list[int] | None:
        seen = cluster.get("/cluster")  # of the last second
        if seen["time"] < began:
            return None
        return [worker["requests"] for worker in seen["pd_workers"] if worker["name"] == name]

    [count] = wait_for(f"a look at {name}", row)
    return int(count)


@pytest.mark.parametrize(
    ("name", "after"),
    [("pd-0", 0), ("pd-0", 5), ("pd-0", 30), ("pd-1", 5), ("pd-1", 30)],
    ids=["prefill before", "prefill during", "prefill after", "decode during", "decode in the stream"],
)
async def test_a_worker_that_dies_around_hand_overs_loses_nothing(
    name: str,
    after: int,
    checkpoint: Path,
    cases: list[Case],
    reference: list[Any],
    slow_steps: tuple[str, ...],
    tmp_path: Path,
) -> None:
    with running_cluster(checkpoint, tmp_path / "run", *ROLES, *slow_steps) as cluster:
        before = cluster.pid(name)
        holds: Callable[[], bool] = lambda: hand_overs(cluster) >= after  # noqa: E731
        async with Streams(cluster.url, cases, STREAM_TOKENS, ["1", "2"]) as streams:
            await stages.gathered(cluster, streams, 10)
            await stages.hold(f"{after} hand-overs", holds, streams)
            await kill_at_work(cluster, name, streams)
            got = await streams.all()
        assert_exact(reference * 2, [answer.token_ids for answer in got])
        assert {answer.finish_reason for answer in got} == {"length"}
        assert hand_overs(cluster) >= after
        assert cluster.total("proxy", "triptych_resumes_total") > 0, "the worker that was killed had nothing"
        await stages.hold("its replacement", lambda: cluster.pids("pd").get(name, before) != before)
        await asyncio.to_thread(assert_at_rest, cluster)


def flush(store: redis.Redis) -> int:
    """Loses everything, workers' registrations and embeddings too, at most twice a second."""
    time.sleep(0.5)
    found = store.dbsize()
    store.flushall()
    return found


async def test_a_store_that_loses_everything_all_the_while_changes_no_answer(
    checkpoint: Path,
    cases: list[Case],
    reference: list[Any],
    slow_steps: tuple[str, ...],
    tmp_path: Path,
) -> None:
    harmed = 0
    with running_cluster(checkpoint, tmp_path / "run", *ROLES, *slow_steps) as cluster:
        async with Streams(cluster.url, cases, STREAM_TOKENS, ["1"]) as streams:
            with redis.Redis.from_url(cluster.store_url, socket_timeout=PATIENCE) as store:
                while not streams.ended:
                    harmed += await asyncio.to_thread(flush, store)
                    await asyncio.sleep(0.01)
            got = await streams.all()
        assert_exact(reference, [answer.token_ids for answer in got])
        assert harmed > 0 and hand_overs(cluster) > 0
        await asyncio.to_thread(assert_at_rest, cluster)
