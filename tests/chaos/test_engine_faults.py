"""An engine's thread dies or hangs while its process lives: every request is answered, and answered right."""

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
from support.processes.cluster import Cluster, start_cluster

pytestmark = pytest.mark.timeout(300)

#: Batches before an encoder is struck, and steps before a PD worker is: with 20 requests of 100 tokens it has
#: far more than a hundred to do, and is in the middle of streams by then.
AFTER = {"encoder": 3, "pd": 100}
#: How the supervisor tells a process's end: by the watchdog, and by faulthandler's timer.
ENDS = {
    "dies": "exit code 70",
    "hangs": "exit code 70",
    "holds_the_interpreter": "exit code 1;",
    "loses_the_device": "exit code 70",
}


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
    target: tuple[str, str],
    fault: str,
    cases: list[Case],
    reference: list[Any],
) -> None:
    """Strikes the engine `target` (process, pool) in the middle of its work, and looks at all answers."""
    service, pool = target
    before = cluster.pid(service)
    faults.order(folder, service, pool, fault, AFTER[pool])
    async with Streams(cluster.url, cases, STREAM_TOKENS, [fault]) as streams:
        got = await streams.all()
    assert_exact(reference, [answer.token_ids for answer in got])
    assert {answer.finish_reason for answer in got} == {"length"}
    assert faults.struck(cluster, service, pool, fault)
    if pool == "pd":
        assert cluster.total("proxy", "triptych_resumes_total") > 0
    # The others may be through with everything before the process ends.
    await hold("the end of the process", lambda: f"{service} ended with" in _log(cluster))
    assert f"{service} ended with {ENDS[fault]}" in _log(cluster)
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
    await _harm(cluster, tmp_path / "faults", (f"{pool}-0", pool), "dies", cases, reference)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2], ids=["one", "two"])
@pytest.mark.parametrize("pool", ["pd", "encoder"])
@pytest.mark.parametrize("fault", faults.FAULTS)
async def test_whatever_becomes_of_an_engine_every_request_is_answered(
    make_harmed, slow_steps, tmp_path, cases, reference, fault, pool, workers
):
    cluster = make_harmed(*_pools(workers, slow_steps))
    await _harm(cluster, tmp_path / "faults", (f"{pool}-0", pool), fault, cases, reference)
