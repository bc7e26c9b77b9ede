"""A rank of a tower dies or stands still in the middle of a batch: every request is answered, and right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.chaos import faults
from support.chaos.rest import assert_at_rest
from support.chaos.stages import hold
from support.chaos.streams import Streams
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS, Case
from support.processes.cluster import Cluster, start_cluster, wait_for
from support.ranks.groups import alive, children

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: Batches of several pictures, so that both ranks have a share.
WORDS = ("--threads", "1", "--encoder-data-parallel", "2", "--max-num-batched-tokens", "64")


@pytest.fixture
def make_cluster_of_ranks(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    """Starts a cluster with so many encoders of two ranks each, harmed by orders in tmp_path/faults."""
    clusters: list[Cluster] = []

    def make(encoders: int) -> Cluster:
        words = ("--encoders", str(encoders), "--pd-workers", "1", *WORDS)
        environment = faults.environment(tmp_path / "faults")
        clusters.append(start_cluster(checkpoint, tmp_path / "run", *words, environment=environment))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.stop()


@pytest.mark.parametrize("encoders", [1, 2], ids=["restart", "takeover"])
@pytest.mark.parametrize("fault", faults.RANK_FAULTS)
async def test_whatever_becomes_of_a_rank_in_a_batch_every_request_is_answered(
    make_cluster_of_ranks: Callable[[int], Cluster],
    tmp_path: Path,
    cases: list[Case],
    reference: list[Any],
    fault: str,
    encoders: int,
) -> None:
    cluster = make_cluster_of_ranks(encoders)
    before = cluster.pid("encoder-0")
    (rank,) = children(before)
    # A crowd for each encoder: neither is through with its part before the fault.
    faults.order(tmp_path / "faults", "encoder-0-rank1", "rank", fault, 1)
    salts = [f"{fault} {number}" for number in range(encoders)]
    async with Streams(cluster.url, cases, STREAM_TOKENS, salts) as streams:
        got = await streams.all()
    assert_exact([*reference] * encoders, [answer.token_ids for answer in got])
    assert {answer.finish_reason for answer in got} == {"length"}
    assert faults.struck(cluster, "encoder-0-rank1", "rank", fault)
    await hold("the end of the worker", lambda: "encoder-0 ended with exit code 70" in _log(cluster))
    await hold("the worker to start anew", lambda: cluster.pids("encoder").get("encoder-0", before) != before)
    wait_for("the end of the old ranks", lambda: not alive(rank))
    await asyncio.to_thread(assert_at_rest, cluster)


def _log(cluster: Cluster) -> str:
    return cluster.log.read_text(errors="replace")
