"""A real primary that is replaced by its Sentinels, under load.

The slow ones are on Debian's Redis, the others on the embedded Valkey.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.data.items import fresh_buffer, make_body, make_plan
from support.stores.sentinels import NAME, WatchedServers, watched_servers
from support.stores.traffic import Traffic
from support.tools import tool
from support.waiting import until
from triptych.base.types import WorkerInfo
from triptych.registry.registry import Registry
from triptych.store.bulk import Loaded
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[WatchedServers]:
    with watched_servers(tmp_path / "watched") as servers:
        yield servers


@pytest.fixture
def watched_redis(tmp_path: Path) -> Iterator[WatchedServers]:
    with watched_servers(tmp_path / "watched", tool("redis-server")) as servers:
        yield servers


async def test_a_killed_primary_is_replaced_under_load_and_nothing_is_wrong(watched: WatchedServers) -> None:
    first = watched.primary
    writer, reader = [await EmbeddingStore.connect(watched.url) for _ in range(2)]
    registry = Registry(writer)
    try:
        before = (await registry.poll("p")).epoch, await writer.epoch()
        async with Traffic(writer, reader) as traffic:
            await asyncio.to_thread(first.kill)
            second = await asyncio.to_thread(watched.wait_for_failover, first)
            await traffic.more(120)
            assert not traffic.wrong
            await registry.register(WorkerInfo("h:1", "encoder", "i", "k", "m"))
            assert (await writer.epoch()) != before[1], "it is another server"
            await asyncio.to_thread(first.start)
            first.call("REPLICAOF", "127.0.0.1", second.port)
            await traffic.more(120)
            assert not traffic.wrong
        assert second.call("DBSIZE") > len(traffic.plans) / 2
    finally:
        await writer.close()
        await reader.close()


@pytest.mark.slow
async def test_a_planned_failover_moves_readers_and_writers(watched_redis):
    """The old primary lives on as a replica, and would still answer a GET."""
    first = watched_redis.primary
    writer, reader = [await EmbeddingStore.connect(watched_redis.url) for _ in range(2)]
    try:
        async with Traffic(writer, reader) as traffic:
            watched_redis.sentinels[0].call("SENTINEL", "FAILOVER", NAME)
            second = await asyncio.to_thread(watched_redis.wait_for_failover, first)
            await traffic.more(120)
            assert not traffic.wrong
            await until(lambda: _port(reader) == _port(writer) == second.port, "all on the new primary")
    finally:
        await writer.close()
        await reader.close()


@pytest.mark.slow
async def test_the_known_primary_is_used_while_all_sentinels_are_down(watched_redis: WatchedServers) -> None:
    store = await EmbeddingStore.connect(watched_redis.url)
    plan = make_plan()
    try:
        for sentinel in watched_redis.sentinels:
            await asyncio.to_thread(sentinel.kill)
        await store.save(plan, make_body(plan), ttl=60)
        store.topology._asked = 0.0  # type: ignore[attr-defined]
        assert await store.ping()
        await asyncio.sleep(0.1)
        loaded = await store.load(plan, fresh_buffer)
        assert isinstance(loaded, Loaded) and bytes(loaded.body) == make_body(plan)
        with pytest.raises(StoreUnavailable, match="name no primary"):
            await EmbeddingStore.connect(watched_redis.url, timeout=1)
    finally:
        await store.close()


@pytest.mark.slow
async def test_a_name_that_no_sentinel_knows_is_told(watched_redis: WatchedServers) -> None:
    url = watched_redis.url.replace(NAME, "others")
    with pytest.raises(StoreUnavailable, match="knows no primary named others"):
        await EmbeddingStore.connect(url, timeout=1)


@pytest.mark.slow
@pytest.mark.parametrize("sentinel_password", ["", "hush"])
async def test_sentinels_have_the_stores_password_or_none(tmp_path: Path, sentinel_password: str) -> None:
    opened = watched_servers(
        tmp_path / "w", tool("redis-server"), password="hush", sentinel_password=sentinel_password
    )
    with opened as watched:
        store = await EmbeddingStore.connect(watched.url.replace("://", "://:hush@"))
        try:
            plan = make_plan()
            await store.save(plan, make_body(plan), ttl=60)
            assert isinstance(await store.load(plan, fresh_buffer), Loaded)
        finally:
            await store.close()
        with pytest.raises(StoreUnavailable):
            await EmbeddingStore.connect(watched.url, timeout=1)


def _port(store: EmbeddingStore) -> int:
    (part,) = store.topology.servers()
    return part.server.address.port
