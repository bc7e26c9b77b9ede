"""Hosts cut off from each other: what has a healthy way is answered while the cut still stands.

Each process is in a network namespace of its own. A machine without namespaces fails these tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.data.checkpoints import build_checkpoint
from support.netns.cluster import (
    HOSTS,
    PROXIES,
    REPEATED,
    TEXTS,
    Clients,
    Question,
    SplitCluster,
    fresh,
    wrong,
)
from support.netns.network import Network

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


@pytest.mark.parametrize("worker", ["encoder-0", "pd-0"])
@pytest.mark.parametrize("both", [True, False], ids=["both ways", "one way"])
async def test_new_pictures_go_to_the_worker_that_reaches_the_store(cluster, worker, both):
    cluster.network.cut("store", worker, both=both)
    await _answered(cluster, *_next_fresh(12), *REPEATED, *TEXTS)


@pytest.mark.parametrize("both", [True, False], ids=["both ways", "one way"])
async def test_a_proxy_without_the_store_serves_all_that_its_workers_can(cluster, both):
    cluster.network.cut("store", "proxy-0", both=both)
    await _answered(cluster, *_next_fresh(6), *REPEATED, *TEXTS, proxies=("proxy-0",))
