"""Hosts cut off from each other: what has a healthy way is answered while the cut still stands.

Each process is in a network namespace of its own. A machine without namespaces fails these tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from support.data.checkpoints import build_checkpoint
from support.matrix import matrix
from support.netns.network import Network, run_as_root
from support.netns.split_cluster import (
    ENCODERS,
    HOSTS,
    PD_WORKERS,
    PROXIES,
    REPEATED,
    TEXTS,
    Clients,
    Question,
    SplitCluster,
    fresh,
    wrong,
)
from support.processes.cluster import wait_for

pytestmark = pytest.mark.timeout(240)

_FRESH = [fresh(number) for number in range(100_000)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SplitCluster]:
    model, folder = build_checkpoint("qwen3_vl"), tmp_path_factory.mktemp("split")
    # What waits for a cut to heal fails: longer than any answer takes, shorter than a test's patience.
    words = ("--request-timeout", "60", "--store-wait", "30")
    with Network(HOSTS) as network, SplitCluster(network, model, folder, *words) as cluster:
        yield cluster


def _next_fresh(count: int) -> list[Question]:
    return [_FRESH.pop() for _ in range(count)]


async def _answered(cluster: SplitCluster, *questions: Question, proxies: tuple[str, ...] = PROXIES) -> None:
    """Asks all while the cut stands; then, healed, once more with other keys: the answers are equal."""
    async with Clients(cluster) as clients:
        with cluster.network.healed():
            got = await clients.ask_all(questions, proxies)
        right = [await clients.ask("proxy-0", question, cache_salt="again") for question in questions]
    assert wrong(got, right) == []


@pytest.mark.parametrize("worker", matrix(["pd-0", "encoder-0"]))
@pytest.mark.parametrize("both", matrix([True, False]))
async def test_new_pictures_go_to_the_worker_that_reaches_the_store(cluster, worker, both):
    if worker == ENCODERS[0]:
        cluster.start_second_encoder()
    cluster.network.cut("store", worker, both=both)
    await _answered(cluster, *_next_fresh(12), *REPEATED, *TEXTS)


@pytest.mark.parametrize("both", matrix([True, False]))
async def test_a_proxy_without_the_store_serves_all_that_its_workers_can(cluster, both):
    cluster.network.cut("store", "proxy-0", both=both)
    await _answered(cluster, *_next_fresh(6), *REPEATED, *TEXTS, proxies=("proxy-0",))


@pytest.mark.slow
async def test_a_proxy_without_the_store_leaves_readiness_while_another_one_is_ready(cluster):
    def status(proxy: str) -> int:
        return cluster.ready(proxy)[0]

    wait_for("both proxies to be ready", lambda: status("proxy-0") == status("proxy-1") == 200)
    with cluster.network.healed():
        cluster.network.cut("store", "proxy-0", both=False)
        wait_for("the proxy to leave", lambda: status("proxy-0") == 503)
        assert status("proxy-1") == 200
        async with Clients(cluster) as clients:
            reply = await clients.ask("proxy-0", TEXTS[0])
        assert reply.status == 200
    wait_for("it to be back", lambda: status("proxy-0") == 200)


async def test_while_no_process_reaches_the_store_proxies_stay_ready_and_text_is_answered(cluster):
    with cluster.network.healed():
        cluster.network.isolate("store")
        for proxy in PROXIES:
            wait_for("a degraded proxy", lambda proxy=proxy: "degraded" in cluster.ready(proxy)[1])
        async with Clients(cluster) as clients:
            replies = await clients.ask_all(TEXTS)
        assert [reply.status for reply in replies] == [200] * len(TEXTS)
        assert [cluster.ready(proxy)[0] for proxy in PROXIES] == [200, 200]


async def test_while_no_process_reaches_the_store_new_pictures_are_answered(cluster):
    fresh_ones = _next_fresh(12)
    with cluster.network.healed():
        cluster.network.isolate("store")
        async with Clients(cluster) as clients:
            got = await clients.ask_all([*fresh_ones, *REPEATED])
        assert [reply.status for reply in got] == [200] * len(got)
    async with Clients(cluster) as clients:
        right = [await clients.ask("proxy-0", reply.question, cache_salt="again") for reply in got]
    assert wrong(got, right) == []
    assert sum(cluster.samples(name)["triptych_ec_loads_total"] for name in PD_WORKERS) > 0


if os.geteuid() != 0:
    # An ordinary user has no namespaces, but may be root of a user namespace: there all of this runs.
    for name in [name for name in globals() if name.startswith("test_")]:
        del globals()[name]

    def test_partitions_as_root_of_a_user_namespace():
        done = run_as_root("-m", "pytest", __file__, "-n", "0", "-q")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
