"""A real Redis Cluster whose slots move and whose nodes die, under load.

The slow ones are on Debian's Redis, the others on the embedded Valkey.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from support.stores.redis_cluster import SLOTS, ClusterServers, cluster_node, redis_cluster
from support.stores.server import StoreServer, eventually
from support.stores.traffic import Traffic
from support.tools import tool
from support.waiting import until
from triptych.base.errors import ConfigError
from triptych.base.types import ItemPlan, WorkerInfo
from triptych.registry.registry import Registry
from triptych.store import codec, keys
from triptych.store.bulk import Loaded, Missing, SaveResult
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.topology.cluster import slot_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterServers]:
    """Three nodes that the tests share: whose items are each on a slot of its own."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder, redis_cluster(Path(folder)) as servers:
        yield servers


@pytest.fixture
def own_cluster(tmp_path: Path) -> Iterator[ClusterServers]:
    """Three nodes of the test's own."""
    with redis_cluster(tmp_path / "cluster", binary=tool("redis-server")) as servers:
        yield servers


@contextlib.asynccontextmanager
async def clients(url: str, count: int = 2, timeout: float = 5.0) -> AsyncIterator[list[EmbeddingStore]]:
    stores = [await EmbeddingStore.connect(url, timeout=timeout) for _ in range(count)]
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


def owner_of(cluster: ClusterServers, key: str) -> StoreServer:
    """The node that has the key's slot."""
    for first, last, primary, *_ in cluster.primaries[-1].call("CLUSTER", "SLOTS"):
        if first <= slot_of(key) <= last:
            return next(node for node in cluster.nodes if node.port == primary[1])
    raise AssertionError(f"no node has the slot of {key}")


def on(cluster: ClusterServers, node: StoreServer, prefix: str, **sizes: int) -> ItemPlan:
    """A plan of an item that the node holds."""
    for number in range(1000):
        plan = make_plan(f"{prefix} {number}", **sizes)
        if owner_of(cluster, keys.embedding(plan.mm_hash)) is node:
            return plan
    raise AssertionError("no item for this node")


async def is_right(store: EmbeddingStore, plan: ItemPlan) -> bool:
    loaded = await store.load(plan, fresh_buffer)
    return isinstance(loaded, Loaded) and bytes(loaded.body) == make_body(plan)


async def test_any_node_leads_to_all_others(cluster: ClusterServers) -> None:
    plans = [on(cluster, node, "item") for node in cluster.primaries]
    for node in cluster.primaries:
        async with clients(f"redis+cluster://127.0.0.1:{node.port}", 1) as (store,):
            for plan in plans:
                await store.save(plan, make_body(plan), ttl=60)
                assert await is_right(store, plan)


async def test_a_dead_seed_does_not_keep_a_client_from_the_others(cluster: ClusterServers) -> None:
    seeds = f"127.0.0.1:1,127.0.0.1:{cluster.primaries[0].port}"
    async with clients(f"redis+cluster://{seeds}", 1) as (store,):
        assert await store.ping()


async def test_a_slot_that_moved_away_is_found_where_it_is(cluster: ClusterServers) -> None:
    source, target, _ = cluster.primaries
    plan, absent = on(cluster, source, "item"), make_plan("absent")
    async with clients(cluster.url) as (writer, reader):
        await writer.save(plan, make_body(plan), ttl=60)
        assert await is_right(reader, plan)
        cluster.move([slot_of(keys.embedding(plan.mm_hash))], source, target)
        assert await is_right(reader, plan)
        assert await writer.save(plan, make_body(plan), ttl=60) is SaveResult.ALREADY
        assert await writer.look_up([(plan.mm_hash, NAMESPACE), (absent.mm_hash, NAMESPACE)]) == [plan, None]


async def test_a_slot_on_the_way_is_read_and_written_on_both_sides(cluster: ClusterServers) -> None:
    """ASK: what is still at the source is served there, what is not is asked of the target."""
    source, target, _ = cluster.primaries
    plan = on(cluster, source, "item")
    slot = slot_of(keys.embedding(plan.mm_hash))
    async with clients(cluster.url) as (writer, reader):
        cluster.begin_move(slot, source, target)
        assert await writer.look_up([(plan.mm_hash, NAMESPACE)]) == [None]
        assert await writer.save(plan, make_body(plan), ttl=60) is SaveResult.STORED
        assert (await count(source, slot), await count(target, slot)) == (0, 1)
        assert await is_right(reader, plan)
        assert await writer.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
        cluster.end_move(slot, target)
        assert await is_right(reader, plan)


@pytest.mark.slow
async def test_a_slot_whose_owner_dies_after_it_moved_away_is_found_at_once(own_cluster):
    """The clients have read the slot map just before: it counts no longer once a server has failed."""
    source, target, _ = own_cluster.primaries
    plan = on(own_cluster, source, "item")
    slot = slot_of(keys.embedding(plan.mm_hash))
    async with clients(own_cluster.url) as (writer, reader):
        own_cluster.move([slot], source, target)
        source.kill()
        assert await writer.look_up([(plan.mm_hash, NAMESPACE)]) == [None]
        assert await reader.load(plan, fresh_buffer) == Missing("no such key")


@pytest.mark.slow
async def test_a_redirect_to_a_node_that_is_not_known_yet_is_followed(own_cluster, tmp_path):
    source = own_cluster.primaries[0]
    plan = on(own_cluster, source, "item")
    slot = slot_of(keys.embedding(plan.mm_hash))
    newcomer = cluster_node(tmp_path / "newcomer", tool("redis-server"))
    newcomer.start()
    async with clients(own_cluster.url) as (writer, reader):
        own_cluster.add(newcomer)
        own_cluster.begin_move(slot, source, newcomer)
        await writer.save(plan, make_body(plan), ttl=60)
        assert await is_right(reader, plan)
        assert await count(newcomer, slot) == 1
        own_cluster.end_move(slot, newcomer)
        assert await is_right(reader, plan)
        assert await writer.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]


def script_errors(node: StoreServer) -> int:
    """How many scripts have ended in an error, as when their keys are on two sides."""
    return int(node.call("INFO", "errorstats").get("errorstat_ERR", {}).get("count", 0))


async def test_a_value_in_parts_that_is_half_moved_is_whole_or_a_miss(cluster, monkeypatch):
    monkeypatch.setattr(codec, "PART_BYTES", 1 << 18)
    source, target, _ = cluster.primaries
    plan = on(cluster, source, "large", rows=500, width=700)
    slot = slot_of(keys.embedding(plan.mm_hash))
    async with clients(cluster.url) as (writer, reader):
        await writer.save(plan, make_body(plan), ttl=60)
        cluster.begin_move(slot, source, target)
        assert cluster.move_keys(slot, source, target, 3) == 3
        assert await is_right(reader, plan), "each part is where it is"
        errors = script_errors(source)
        looking = asyncio.create_task(writer.look_up([(plan.mm_hash, NAMESPACE)]))
        await until(lambda: script_errors(source) > errors, "the look-up to be told that its keys are apart")
        cluster.move_keys(slot, source, target)
        cluster.end_move(slot, target)
        assert await looking == [plan], "asked again until the script has all its keys on one side"
        assert await is_right(reader, plan)
        assert await writer.save(plan, make_body(plan), ttl=60) is SaveResult.ALREADY


@pytest.mark.slow
async def test_slots_move_under_load_and_nothing_is_wrong_or_encoded_again(own_cluster, tmp_path):
    source, target, _ = own_cluster.primaries
    newcomer = cluster_node(tmp_path / "newcomer", tool("redis-server"))
    newcomer.start()
    async with clients(own_cluster.url) as (writer, reader):
        async with Traffic(writer, reader) as traffic:
            await traffic.more(100)
            await until(lambda: len(traffic.encoded) == len(traffic.plans), "all items to be saved")
            traffic.encoded.clear()
            await asyncio.to_thread(own_cluster.add, newcomer)
            held = [slot_of(keys.embedding(plan.mm_hash)) for plan in traffic.plans]
            theirs = [slot for slot in held if slot < -(-SLOTS // 3)]
            assert len(theirs) > 5
            await asyncio.to_thread(own_cluster.move, theirs, source, newcomer)
            await asyncio.to_thread(own_cluster.move, theirs[::2], newcomer, target)
            await traffic.more(100)
        assert not traffic.wrong
        assert (traffic.encoded, traffic.misses) == (set(), 0), "every item moved with its slot"
        assert traffic.unavailable == 0
        assert newcomer.call("DBSIZE") > 0


@pytest.mark.slow
async def test_a_dead_node_without_a_replica_takes_only_its_own_items_away(own_cluster):
    home = owner_of(own_cluster, keys.EPOCH)
    victim = next(node for node in own_cluster.primaries if node is not home)
    theirs = on(own_cluster, victim, "theirs")
    others = [on(own_cluster, node, "others") for node in own_cluster.primaries if node is not victim]
    async with clients(own_cluster.url) as (writer, reader):
        for plan in (theirs, *others):
            await writer.save(plan, make_body(plan), ttl=60)
        await asyncio.to_thread(victim.kill)
        for attempt in range(2):
            for plan in others:
                assert await is_right(reader, plan)
                assert await writer.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
            with pytest.raises(StoreUnavailable):
                await reader.load(theirs, fresh_buffer)
            with pytest.raises(StoreUnavailable):
                await writer.look_up([(theirs.mm_hash, NAMESPACE)])
            with pytest.raises(StoreUnavailable):
                await writer.save(theirs, make_body(theirs), ttl=60)
            if attempt == 0:
                await asyncio.to_thread(
                    eventually, "the others to find it", lambda: is_failed(own_cluster, victim)
                )
        await Registry(writer).register(WorkerInfo("h:1", "encoder", "i", "k", "m"))
        async with clients(own_cluster.url, 1) as (newcomer,):
            assert await is_right(newcomer, others[0]), "a process may start meanwhile"
        await asyncio.to_thread(victim.start)
        await asyncio.to_thread(eventually, "it to be back", lambda: not is_failed(own_cluster, victim))
        assert isinstance(await reader.load(theirs, fresh_buffer), Missing), "it has come back empty"
        assert await writer.save(theirs, make_body(theirs), ttl=60) is SaveResult.STORED
        assert await is_right(reader, theirs)


@pytest.mark.slow
async def test_a_replica_takes_over_under_load_and_nothing_is_wrong(tmp_path: Path) -> None:
    with redis_cluster(tmp_path / "cluster", replicas=1, binary=tool("redis-server")) as cluster:
        home = owner_of(cluster, keys.EPOCH)
        async with clients(cluster.url) as (writer, reader):
            registry = Registry(writer)
            await registry.register(WorkerInfo("h:1", "encoder", "i", "k", "m"), term=600)
            before = await writer.epoch()
            async with Traffic(writer, reader) as traffic:
                await until(lambda: len(traffic.encoded) == len(traffic.plans), "all items to be saved")
                traffic.encoded.clear()
                theirs = {
                    plan.mm_hash
                    for plan in traffic.plans
                    if owner_of(cluster, keys.embedding(plan.mm_hash)) is home
                }
                await asyncio.to_thread(home.kill)
                await asyncio.to_thread(eventually, "a failover", lambda: has_failed_over(cluster, home))
                await traffic.more(120)
            assert not traffic.wrong
            assert traffic.encoded <= theirs, "at most all that the dead node held"
            assert [info.address for info in await registry.workers()] == ["h:1"]
            assert await writer.epoch() != before


@pytest.mark.slow
async def test_a_node_that_stands_still_costs_a_timeout_and_no_wrong_answer(own_cluster):
    home = owner_of(own_cluster, keys.EPOCH)
    victim = next(node for node in own_cluster.primaries if node is not home)
    theirs, others = on(own_cluster, victim, "theirs"), on(own_cluster, home, "others")
    # Longer than a busy machine takes for an answer: each of two calls waits for all of it.
    async with clients(own_cluster.url, timeout=3.0) as (writer, reader):
        for plan in (theirs, others):
            await writer.save(plan, make_body(plan), ttl=60)
        victim.pause()
        try:
            with pytest.raises(StoreUnavailable):
                await reader.load(theirs, fresh_buffer)
            with pytest.raises(StoreUnavailable):
                await writer.look_up([(theirs.mm_hash, NAMESPACE), (others.mm_hash, NAMESPACE)])
            assert await is_right(reader, others)
        finally:
            victim.resume()
        await asyncio.to_thread(eventually, "it to serve", lambda: not is_failed(own_cluster, victim))
        assert await is_right(reader, theirs)


async def test_a_single_server_is_not_taken_for_a_cluster_nor_the_reverse(cluster, tmp_path):
    single = StoreServer(tmp_path / "single")
    single.start()
    try:
        with pytest.raises(ConfigError, match="write redis://"):
            await EmbeddingStore.connect(f"redis+cluster://127.0.0.1:{single.port}")
        with pytest.raises(ConfigError, match=r"write redis\+cluster://"):
            await EmbeddingStore.connect(cluster.primaries[0].url)
    finally:
        single.kill()


async def count(node: StoreServer, slot: int) -> int:
    """Keys of the slot on the node."""
    return int(node.call("CLUSTER", "COUNTKEYSINSLOT", slot))


def is_failed(cluster: ClusterServers, victim: StoreServer) -> bool:
    """Whether one of the other nodes takes it for failed."""
    other = next(node for node in cluster.primaries if node is not victim)
    lines = other.call("CLUSTER", "NODES").decode().splitlines()
    (line,) = [line for line in lines if f":{victim.port}@" in line]
    return "fail" in line.split()[2]


def has_failed_over(cluster: ClusterServers, dead: StoreServer) -> bool:
    """Whether all slots are those of nodes that live."""
    rows = cluster.replicas[0].call("CLUSTER", "SLOTS")
    owners = {row[2][1] for row in rows}
    return dead.port not in owners and sum(row[1] - row[0] + 1 for row in rows) == SLOTS
