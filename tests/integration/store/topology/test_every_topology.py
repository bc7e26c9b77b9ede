"""What holds in every topology, and a name that moves."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from support.stores.server import StoreServer
from support.stores.traffic import Traffic
from triptych.base.scaling import PoolDemand, ScalingDecision
from triptych.base.types import WorkerInfo
from triptych.registry.leases import Lease, Leases, OwnedBy
from triptych.registry.registry import Registry
from triptych.registry.scaling import ScalingBoard
from triptych.store import bulk_pool, codec, keys, shares
from triptych.store.bulk import Loaded, Missing, SaveResult
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.shares import StoreShares


async def test_many_items_are_saved_looked_up_and_loaded_byte_for_byte(topology_store):
    plans = [make_plan(f"item {n}", rows=50 + n, width=64) for n in range(40)]
    saved = await asyncio.gather(*(topology_store.save(plan, make_body(plan), ttl=60) for plan in plans))
    assert set(saved) == {SaveResult.STORED}
    absent = make_plan("absent")
    keys_ = [(plan.mm_hash, NAMESPACE) for plan in (*plans, absent)]
    assert await topology_store.look_up(keys_) == [*plans, None]
    assert await topology_store.look_up([]) == []
    for plan in plans:
        loaded = await topology_store.load(plan, fresh_buffer)
        assert isinstance(loaded, Loaded) and bytes(loaded.body) == make_body(plan)
    assert await topology_store.load(absent, fresh_buffer) == Missing("no such key", "")


async def test_a_value_in_parts_is_saved_renewed_loaded_and_replaced(topology_store, monkeypatch):
    monkeypatch.setattr(codec, "PART_BYTES", 1 << 20)
    plans = [make_plan(f"large {n}", rows=1000, width=700) for n in range(4)]
    for plan in plans:
        body = make_body(plan)
        assert await topology_store.save(plan, body, ttl=60) is SaveResult.STORED
        assert await topology_store.save(plan, body, ttl=60) is SaveResult.ALREADY
        assert await topology_store.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
        loaded = await topology_store.load(plan, fresh_buffer)
        assert isinstance(loaded, Loaded) and bytes(loaded.body) == body


async def test_leases_have_one_owner(topology_store: EmbeddingStore) -> None:
    leases = Leases(topology_store)
    mm_hash = make_plan().mm_hash
    first = await leases.acquire(mm_hash, address="a", incarnation="i", term=60)
    assert isinstance(first, Lease)
    second = await leases.acquire(mm_hash, address="b", incarnation="i", term=60)
    assert isinstance(second, OwnedBy) and second.address == "a"
    assert await leases.renew(first, 60)
    assert await leases.release(first)
    assert await leases.collect_dead() == 0


async def test_workers_find_each_other_and_the_scaling_board_works(topology_store: EmbeddingStore) -> None:
    registry, board = Registry(topology_store), ScalingBoard(topology_store)
    info = WorkerInfo("h:1", "encoder", "i", "k", "m")
    await registry.register(info, term=60)
    snapshot = await registry.poll("p1", 60)
    assert snapshot.workers == [info] and snapshot.proxies == 1
    assert (await registry.poll("p1", 60, mark=snapshot.mark)).workers is None
    demand = PoolDemand(1.0, 2, 3.0, 4.0, 5.0)
    assert await board.publish("p1", "encoder", demand, 60) == [demand]
    assert await board.decision("encoder") is None
    assert await board.announce("encoder", ScalingDecision(2, "backlog", True), 60)
    assert await board.decision("encoder") == ScalingDecision(2, "backlog", True)
    await registry.withdraw(info)
    assert await registry.collect_dead(-61) == 1


async def test_a_cancelled_load_does_not_disturb_the_next_one(topology_store: EmbeddingStore) -> None:
    plans = [make_plan(f"item {n}", rows=2000, width=256) for n in range(12)]
    for plan in plans:
        await topology_store.save(plan, make_body(plan), ttl=60)
    for _ in range(5):
        loads = [asyncio.create_task(topology_store.load(plan, fresh_buffer)) for plan in plans]
        await asyncio.sleep(0.002)
        for load in loads[::2]:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
    for plan in plans:
        loaded = await topology_store.load(plan, fresh_buffer)
        assert isinstance(loaded, Loaded) and bytes(loaded.body) == make_body(plan)


NAME = "store.example"


class Names:
    """What the name resolves to."""

    def __init__(self) -> None:
        self.host = "127.0.0.1"

    def getaddrinfo(self, host: object, *args: Any, **kwargs: Any) -> Any:
        return _RESOLVE(self.host if host == NAME else host, *args, **kwargs)


_RESOLVE = socket.getaddrinfo


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made.getaddrinfo)
    return made


@pytest.fixture
def two(tmp_path: Path) -> Iterator[list[StoreServer]]:
    """Two servers at one port of two addresses."""
    first = StoreServer(tmp_path / "a")
    second = StoreServer(tmp_path / "b", host="127.0.0.2", port=first.port)
    try:
        for server in (first, second):
            server.start()
        yield [first, second]
    finally:
        first.kill()
        second.kill()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "made a replica"])
async def test_clients_go_to_the_new_host(two, names, monkeypatch, fault):
    """A server that is made a replica keeps its connections, and answers reads on them."""
    monkeypatch.setattr(bulk_pool, "MAX_AGE", 0.3)
    first, second = two
    second.call("REPLICAOF", "127.0.0.1", first.port)
    url = f"redis://{NAME}:{first.port}/0"
    writer, reader = [await EmbeddingStore.connect(url) for _ in range(2)]
    try:
        async with Traffic(writer, reader) as traffic:
            second.call("REPLICAOF", "NO", "ONE")
            names.host = "127.0.0.2"
            if fault == "killed":
                await asyncio.to_thread(first.kill)
            else:
                first.call("REPLICAOF", "127.0.0.2", second.port)
            await traffic.more(120)
            assert not traffic.wrong
        # What still leads to the first server is too old from now on.
        monkeypatch.setattr(bulk_pool, "MAX_AGE", 0.0)
        if fault == "made a replica":
            first.call("REPLICAOF", "127.0.0.1", 1)
        plan = make_plan("written after it")
        assert await writer.save(plan, make_body(plan), ttl=60) is SaveResult.STORED
        assert second.call("EXISTS", f"ec:{{{plan.mm_hash}}}") == 1
        assert await writer.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
        assert isinstance(await reader.load(plan, fresh_buffer), Loaded)
    finally:
        await writer.close()
        await reader.close()


async def test_each_shard_counts_its_values_and_a_tenant_above_its_share_gives_up_its_own(
    topology_store, monkeypatch
):
    store = topology_store
    servers = [each.server for each in store.topology.servers()]
    for server in servers:
        await server.control.execute("CONFIG", "SET", "maxmemory", 96 << 20)
    # A scan between two saves that are counted together would find the second one gone.
    monkeypatch.setattr(shares, "_SCAN_SECONDS", math.inf)
    store.shares = StoreShares(store.topology, store.control, young=0.0)
    alice, bob = "a" * 16, "b" * 16
    theirs = {
        tenant: [make_plan(f"{tenant} {n}", rows=64, width=2048) for n in range(count)]
        for tenant, count in ((bob, 12), (alice, 180 * len(servers)))
    }
    shards = {}
    for tenant, plans in theirs.items():
        for plan in plans:
            key = keys.embedding(plan.mm_hash)
            shard = shards[key] = await store.topology.shard_of(key)
            owners = [
                await store.topology.on_owner(each, 0, _itself)
                for each in (key, keys.usage(shard, "", "")[0], keys.usage(shard, tenant, "embedding")[1])
            ]
            assert len(set(map(id, owners))) == 1, "counts lie where the values do"
            await store.save(plan, b"\0" * plan.nbytes, ttl=600, tenant=tenant)
    await store.shares.note()
    assert len(set(shards.values())) == len(servers)
    there = {
        tenant: sum(await store.control.execute_all([("EXISTS", keys.embedding(p.mm_hash)) for p in plans]))
        for tenant, plans in theirs.items()
    }
    assert there[bob] == 12
    assert 0 < there[alice] < 180 * len(servers)
    counted = 0
    for shard in set(shards.values()):
        await store.shares.scan(shard)
        counted += int(
            await store.control.execute("HGET", keys.usage(shard, "", "")[0], f"{alice}:embedding")
        )
    assert counted == there[alice] * theirs[alice][0].nbytes


async def _itself(server, ask):
    return server
