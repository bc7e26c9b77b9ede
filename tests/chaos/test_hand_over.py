"""Prefill and decode workers are killed while requests go from one to the other: nothing is lost or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.chaos import stages
from support.chaos.rest import assert_at_rest
from support.chaos.streams import Streams
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS, Case
from support.processes.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROLES = ("--prefill-workers", "1", "--decode-workers", "2", "--prefill-threshold", "0", "--threads", "1")


def hand_overs(cluster: Cluster) -> float:
    return cluster.total("proxy", "triptych_hand_overs_total")


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
            with stages.stopped(cluster, "pd"):
                streams.assert_under_way("the kill")
                cluster.kill(name)
            got = await streams.all()
        assert_exact(reference * 2, [answer.token_ids for answer in got])
        assert {answer.finish_reason for answer in got} == {"length"}
        assert hand_overs(cluster) >= after
        assert cluster.total("proxy", "triptych_resumes_total") > 0, "the worker that was killed had nothing"
        await stages.hold("the process anew", lambda: cluster.pids("pd").get(name, before) != before)
        await asyncio.to_thread(assert_at_rest, cluster)
