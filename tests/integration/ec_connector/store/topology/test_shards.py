"""Several real servers that share the items, and some of them dead, silent or full."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from support.stores.server import StoreServer
from support.stores.traffic import Traffic
from support.waiting import until
from triptych.ec_connector.registry.leases import Lease, Leases
from triptych.ec_connector.registry.registry import Registry
from triptych.ec_connector.store.control import StoreFull, StoreUnavailable
from triptych.ec_connector.store.embedding_store import EmbeddingStore
from triptych.ec_connector.store.results import Loaded, Missing, SaveResult
from triptych.ec_connector.store.shards.placement import placed
from triptych.types import ItemPlan, WorkerInfo


def url_of(servers: Sequence[StoreServer]) -> str:
    return " ".join(server.url for server in servers)


def order_of(servers: Sequence[StoreServer], plan: ItemPlan) -> list[int]:
    """The shards in the order in which they hold the item."""
    return placed([server.url.removeprefix("redis://") for server in servers], plan.mm_hash)


def on(servers: Sequence[StoreServer], shard: int, prefix: str, then: int | None = None) -> ItemPlan:
    """A plan of an item of this shard, and while that is down of the shard `then`."""
    for number in range(1000):
        plan = make_plan(f"{prefix} {number}")
        order = order_of(servers, plan)
        if order[0] == shard and then in (None, order[1]):
            return plan
    raise AssertionError("no item for this shard")


@contextlib.asynccontextmanager
async def clients(
    servers: Sequence[StoreServer], count: int = 2, timeout: float = 5.0
) -> AsyncIterator[list[EmbeddingStore]]:
    stores = [await EmbeddingStore.connect(url_of(servers), timeout=timeout) for _ in range(count)]
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


async def is_right(store: EmbeddingStore, plan: ItemPlan) -> bool:
    loaded = await store.load(plan, fresh_buffer)
    return isinstance(loaded, Loaded) and bytes(loaded.body) == make_body(plan)


async def test_every_shard_holds_its_part_whatever_the_order_of_the_list(
    three_shards: list[StoreServer],
) -> None:
    plans = [make_plan(f"item {n}") for n in range(90)]
    async with clients(three_shards, 1) as (store,), clients(three_shards[::-1], 1) as (other,):
        for plan in plans:
            await store.save(plan, make_body(plan), ttl=60)
        keys_ = [(plan.mm_hash, NAMESPACE) for plan in plans]
        assert await store.look_up(keys_) == plans
        assert await other.look_up(keys_) == plans
        assert {await other.save(plan, make_body(plan), ttl=60) for plan in plans} == {SaveResult.ALREADY}
    held = [len(server.call("KEYS", "ec:*")) for server in three_shards]
    assert sum(held) == 90 and min(held) > 15, held


async def test_the_first_shard_holds_registry_and_leases(three_shards: list[StoreServer]) -> None:
    async with clients(three_shards, 1) as (store,):
        await Registry(store).register(WorkerInfo("h:1", "encoder", "i", "k", "m"))
        await Leases(store).acquire(make_plan().mm_hash, address="a", incarnation="i", term=60)
    assert three_shards[0].call("KEYS", "{registry}:workers") and three_shards[0].call("KEYS", "{leases}*")
    for server in three_shards[1:]:
        assert not server.call("KEYS", "{registry}:workers") and not server.call("KEYS", "{leases}*")


async def test_a_list_of_other_shards_is_warned_of(
    three_shards: list[StoreServer], caplog: pytest.LogCaptureFixture
) -> None:
    async with clients(three_shards, 1), clients([three_shards[0], *three_shards[:0:-1]], 1):
        assert "an earlier process" not in caplog.text, "the same shards in another order"
    async with clients(three_shards[:2], 1):
        assert f"an earlier process 127.0.0.1:{min(s.port for s in three_shards)}/0" in caplog.text
    caplog.clear()
    async with clients(three_shards[:1], 1):
        assert "an earlier process" in caplog.text


async def test_a_dead_shard_under_load_costs_encodes_of_its_items_only(
    three_shards: list[StoreServer],
) -> None:
    async with clients(three_shards) as (writer, reader):
        async with Traffic(writer, reader) as traffic:
            await until(lambda: len(traffic.encoded) == len(traffic.plans), "all items to be saved")
            # A task that looked for the last item before it was there may save it once more.
            await traffic.more(2 * traffic.tasks)
            traffic.encoded.clear()
            theirs = {plan.mm_hash for plan in traffic.plans if order_of(three_shards, plan)[0] == 1}
            await asyncio.to_thread(three_shards[1].kill)
            await until(lambda: len(traffic.encoded) == len(theirs), "its items to be encoded again")
            assert traffic.encoded == theirs
            # As above.
            await traffic.more(2 * traffic.tasks)
            assert traffic.encoded == theirs
            traffic.encoded.clear()
            await asyncio.to_thread(three_shards[1].start)
            await until(lambda: not any(store._placement._probes for store in (writer, reader)), "its return")
            await traffic.more(120)
            assert not traffic.encoded, "what others hold for it is still found there"
        assert (traffic.wrong, traffic.unavailable) == ([], 0)


async def test_a_silent_shard_is_left_out_after_one_timeout(three_shards: list[StoreServer]) -> None:
    plan = on(three_shards, 2, "item")
    async with clients(three_shards, timeout=0.5) as (writer, reader):
        await writer.save(plan, make_body(plan), ttl=60)
        three_shards[2].pause()
        try:
            assert await writer.look_up([(plan.mm_hash, NAMESPACE)]) == [None]
            assert await writer.save(plan, make_body(plan), ttl=60) is SaveResult.STORED
            assert await is_right(reader, plan)
            began = asyncio.get_running_loop().time()
            for _ in range(20):
                assert await writer.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
                assert await is_right(reader, plan)
            assert asyncio.get_running_loop().time() - began < 10, "20 timeouts of 0.5 s each way"
        finally:
            three_shards[2].resume()


async def test_an_item_of_a_shard_that_only_the_writer_lost_is_found(three_shards: list[StoreServer]) -> None:
    """The two processes need not agree on which shards are down."""
    plan = on(three_shards, 1, "item", then=2)
    async with clients(three_shards) as (writer, reader):
        writer._placement.failed(writer.shards[1], StoreUnavailable("only here"))
        await writer.save(plan, make_body(plan), ttl=60)
        assert len(three_shards[2].call("KEYS", "ec:*")) == 1
        assert await reader.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
        assert await is_right(reader, plan)


async def test_without_the_first_shard_items_are_served_and_registrations_wait(
    three_shards: list[StoreServer],
) -> None:
    plan = on(three_shards, 0, "item")
    async with clients(three_shards) as (writer, reader):
        registry, leases = Registry(writer), Leases(writer)
        await asyncio.to_thread(three_shards[0].kill)
        assert await writer.save(plan, make_body(plan), ttl=60) is SaveResult.STORED
        assert await is_right(reader, plan)
        assert await writer.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
        assert await writer.epoch()
        assert (await writer.memory()).max_bytes == 3 * (64 << 20)
        with pytest.raises(StoreUnavailable):
            await registry.register(WorkerInfo("h:1", "encoder", "i", "k", "m"))
        await asyncio.to_thread(three_shards[0].start)
        await registry.register(WorkerInfo("h:1", "encoder", "i", "k", "m"))
        held = await leases.acquire(plan.mm_hash, address="a", incarnation="i", term=60)
        assert isinstance(held, Lease)


async def test_a_process_starts_while_another_shard_than_the_first_is_dead(
    three_shards: list[StoreServer], caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(three_shards[2].kill)
    plan = on(three_shards, 2, "item")
    async with clients(three_shards, 1) as (store,):
        assert f":{three_shards[2].port}" in caplog.text
        await store.save(plan, make_body(plan), ttl=60)
        assert await is_right(store, plan)
    await asyncio.to_thread(three_shards[0].kill)
    with pytest.raises(StoreUnavailable):
        await EmbeddingStore.connect(url_of(three_shards), timeout=1)


async def test_without_any_shard_everything_is_unavailable(three_shards: list[StoreServer]) -> None:
    plan = make_plan()
    async with clients(three_shards, 1) as (store,):
        for server in three_shards:
            await asyncio.to_thread(server.kill)
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await store.save(plan, make_body(plan), ttl=60)
            with pytest.raises(StoreUnavailable):
                await store.load(plan, fresh_buffer)
            with pytest.raises(StoreUnavailable):
                await store.look_up([(plan.mm_hash, NAMESPACE)])
            with pytest.raises(StoreUnavailable):
                await store.epoch()
        for server in three_shards:
            await asyncio.to_thread(server.start)
        assert isinstance(await store.load(plan, fresh_buffer), Missing)
        await store.save(plan, make_body(plan), ttl=60)


async def test_a_damaged_value_on_one_shard_is_replaced_there(three_shards: list[StoreServer]) -> None:
    plan = on(three_shards, 1, "item")
    async with clients(three_shards, 1) as (store,):
        await store.save(plan, make_body(plan), ttl=60)
        three_shards[1].call("SETRANGE", f"ec:{{{plan.mm_hash}}}", 200, "rubbish")
        missing = await store.load(plan, fresh_buffer)
        assert isinstance(missing, Missing) and missing.damaged_digest
        replaced = await store.save(plan, make_body(plan), ttl=60, damaged_digest=missing.damaged_digest)
        assert replaced is SaveResult.REPLACED
        assert await is_right(store, plan)


async def test_a_full_shard_refuses_and_is_not_taken_for_dead(three_shards: list[StoreServer]) -> None:
    plan = on(three_shards, 1, "item")
    async with clients(three_shards, 1) as (store,):
        three_shards[1].call("CONFIG", "SET", "maxmemory", "1mb")
        with pytest.raises(StoreFull):
            await store.save(plan, make_body(plan), ttl=60)
        assert not store._placement._probes
        assert (await store.memory()).max_bytes == 3 << 20, "as much as fits before the first one is full"


async def test_the_epoch_changes_when_any_shard_is_flushed_or_dies(three_shards: list[StoreServer]) -> None:
    async with clients(three_shards, 1) as (store,):
        epochs = [await store.epoch()]
        three_shards[2].call("FLUSHALL")
        epochs.append(await store.epoch())
        await asyncio.to_thread(three_shards[1].kill)
        epochs.append(await store.epoch())
        assert len(set(epochs)) == 3
        assert await store.epoch() == epochs[-1]


async def test_a_look_up_of_hits_is_one_round_trip_to_each_shard(
    three_shards: list[StoreServer], caplog: pytest.LogCaptureFixture
) -> None:
    plans = [make_plan(f"item {n}") for n in range(30)]
    async with clients(three_shards, 1) as (store,):
        for plan in plans:
            await store.save(plan, make_body(plan), ttl=60)
        before = [calls(server) for server in three_shards]
        await store.look_up([(plan.mm_hash, NAMESPACE) for plan in plans])
        assert sum(calls(server) for server in three_shards) - sum(before) == 30


def calls(server: StoreServer) -> int:
    """Scripts run so far."""
    return int(server.call("INFO", "commandstats").get("cmdstat_eval", {}).get("calls", 0))
