"""A store of several servers, one of which dies while a cluster runs on it: every answer is right.

On Debian's Redis. The store is the whole cluster's: proxy, encoder workers and PD workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.chaos.faults import sleeping
from support.chaos.rest import assert_at_rest
from support.chaos.stages import hold
from support.chaos.streams import Streams
from support.data.oracle import assert_exact
from support.data.traffic import STREAM_TOKENS, Case, expected, mixed_cases
from support.stores.redis_cluster import redis_cluster
from support.stores.sentinels import watched_servers
from support.tools import tool
from triptych.store import keys
from triptych.store.topology.cluster import slot_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

#: An item sleeps so long in the tower: most are still to be stored when the fault comes.
TOWER_SECONDS = 0.3


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return mixed_cases(8, seed=15, sizes=((160, 160), (128, 192)))


@pytest.fixture(scope="module")
def reference(checkpoint: Path, cases: list[Case]) -> list[Any]:
    return expected(checkpoint, cases, STREAM_TOKENS)


@contextmanager
def replicated_cluster(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """A Redis Cluster; the fault: the primary that holds registry and leases dies."""
    with redis_cluster(folder, replicas=1, binary=tool("redis-server")) as servers:

        def kill_the_home() -> None:
            for first, last, primary, *_ in servers.primaries[0].call("CLUSTER", "SLOTS"):
                if first <= slot_of(keys.EPOCH) <= last:
                    next(node for node in servers.nodes if node.port == primary[1]).kill()
                    return

        yield servers.url, kill_the_home


@contextmanager
def resharded_cluster(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """A Redis Cluster; the fault: a third of all slots that hold something move to another node."""
    with redis_cluster(folder, binary=tool("redis-server")) as servers:
        source, target, _ = servers.primaries

        def reshard() -> None:
            held = [slot for slot in range(5462) if source.call("CLUSTER", "COUNTKEYSINSLOT", slot)]
            servers.move(held, source, target)

        yield servers.url, reshard


@contextmanager
def watched(folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Servers behind Sentinels; the fault: the primary dies."""
    with watched_servers(folder, tool("redis-server")) as servers:
        yield servers.url, lambda: servers.primary.kill()


@pytest.mark.parametrize("opened", [replicated_cluster, resharded_cluster, watched])
async def test_a_server_of_the_store_that_dies_or_moves_changes_no_answer(
    opened: Any, start: Any, cases: Any, reference: Any, tmp_path: Path
) -> None:
    with opened(tmp_path / "servers") as (url, fault):
        words = ("--encoder-batch-patches", "1", "--store", url, "--store-wait", "120")
        cluster = await asyncio.to_thread(start, *words, environment=sleeping(tower=TOWER_SECONDS))

        def towers() -> float:
            return float(cluster.total("encoder", "triptych_encoder_tower_items_total"))

        async with Streams(cluster.url, cases, STREAM_TOKENS, [""]) as streams:
            await hold("an embedding", lambda: towers() > 1, streams)
            assert cluster.total("proxy", "triptych_waiting_items"), "nothing is left to store"
            await asyncio.to_thread(fault)
            got = await streams.all()
        assert_exact(reference, [answer.token_ids for answer in got])
        # Once more: what is stored is found, where it is now.
        async with Streams(cluster.url, cases, STREAM_TOKENS, [""]) as streams:
            got = await streams.all()
        assert_exact(reference, [answer.token_ids for answer in got])
        await asyncio.to_thread(assert_at_rest, cluster)
        await asyncio.to_thread(cluster.stop)
