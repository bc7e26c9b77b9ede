"""An engine's thread or a rank of a tower dies or hangs: every request is answered, and answered right."""

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
from support.matrix import matrix
from support.processes.cluster import Cluster, start_cluster, wait_for
from support.ranks.groups import alive, children

pytestmark = pytest.mark.timeout(300)

#: Batches before an encoder is struck, and steps before a PD worker is: with 20 requests of 100 tokens it has
#: far more than a hundred to do, and is in the middle of streams by then.
AFTER = {"encoder": 3, "pd": 100}
#: How the supervisor tells a process's end: by the watchdog, and by faulthandler's timer.
ENDS = {"holds_the_interpreter": "exit code 1;"}
#: Batches of several pictures, so that both ranks of a tower have a share.
RANKS = ("--encoder-data-parallel", "2", "--max-num-batched-tokens", "64")


@pytest.fixture
def make_harmed(checkpoint: Path, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """Starts a cluster whose engines may be harmed by orders in tmp_path/faults."""
    clusters: list[Cluster] = []

    def make(*words: str) -> Cluster:
        environment = faults.environment(tmp_path / "faults")
        clusters.append(start_cluster(checkpoint, tmp_path / "run", *words, environment=environment))
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.stop()


async def _harm(
    cluster: Cluster,
    folder: Path,
    order: tuple[str, str, str, int],
    cases: list[Case],
    reference: list[Any],
    ends: str = "exit code 70",
    crowds: int = 1,
) -> None:
    """Strikes an engine as `order` says in the middle of its work, and looks at all answers."""
    harmed, pool, fault, _ = order
    service = harmed.partition("-rank")[0]
    before = cluster.pid(service)
    faults.order(folder, *order)
    salts = [f"{fault} {number}" for number in range(crowds)]
    async with Streams(cluster.url, cases, STREAM_TOKENS, salts) as streams:
        got = await streams.all()
    assert_exact([*reference] * crowds, [answer.token_ids for answer in got])
    assert {answer.finish_reason for answer in got} == {"length"}
    assert faults.struck(cluster, harmed, pool, fault)
    if pool == "pd":
        assert cluster.total("proxy", "triptych_resumes_total") > 0
    # The others may be through with everything before the process ends.
    await hold("the end of the process", lambda: f"{service} ended with {ends}" in _log(cluster))
    names = service.split("-")[0]
    await hold("the process to start anew", lambda: cluster.pids(names).get(service, before) != before)
    await asyncio.to_thread(assert_at_rest, cluster)


def _log(cluster: Cluster) -> str:
    return cluster.log.read_text(errors="replace")


def _pools(workers: int, slow_steps: tuple[str, ...]) -> tuple[str, ...]:
    return ("--encoders", str(workers), "--pd-workers", str(workers), "--threads", "1", *slow_steps)


@pytest.mark.parametrize("pool", matrix(["pd", "encoder"]))
async def test_an_only_worker_whose_engine_dies_starts_anew_and_every_request_is_answered(
    make_harmed, slow_steps, tmp_path, cases, reference, pool
):
    cluster = make_harmed(*_pools(1, slow_steps))
    await _harm(cluster, tmp_path / "faults", (f"{pool}-0", pool, "dies", AFTER[pool]), cases, reference)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2], ids=["one", "two"])
@pytest.mark.parametrize("pool", ["pd", "encoder"])
@pytest.mark.parametrize("fault", faults.FAULTS)
async def test_whatever_becomes_of_an_engine_every_request_is_answered(
    make_harmed, slow_steps, tmp_path, cases, reference, fault, pool, workers
):
    cluster = make_harmed(*_pools(workers, slow_steps))
    order = (f"{pool}-0", pool, fault, AFTER[pool])
    await _harm(cluster, tmp_path / "faults", order, cases, reference, ENDS.get(fault, "exit code 70"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("encoders", [1, 2], ids=["restart", "takeover"])
@pytest.mark.parametrize("fault", faults.RANK_FAULTS)
async def test_whatever_becomes_of_a_rank_in_a_batch_every_request_is_answered(
    make_harmed, tmp_path, cases, reference, fault, encoders
):
    cluster = make_harmed("--encoders", str(encoders), "--pd-workers", "1", "--threads", "1", *RANKS)
    (rank,) = children(cluster.pid("encoder-0"))
    # A crowd for each encoder: neither is through with its part before the fault.
    order = ("encoder-0-rank1", "rank", fault, 1)
    await _harm(cluster, tmp_path / "faults", order, cases, reference, crowds=encoders)
    wait_for("the end of the old ranks", lambda: not alive(rank))
