"""Shares of a real store: a tenant that fills it gives up its own values, never another's."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from support.stores.server import StoreServer, eventually
from support.waiting import until, within
from triptych.base.types import ItemPlan
from triptych.store import codec, keys, shares
from triptych.store.bulk import Loaded
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.shares import StoreShares

ALICE, BOB = "a" * 16, "b" * 16
MEMORY = 16 << 20
ROWS, WIDTH = 64, 1024
NBYTES = ROWS * WIDTH * 4


@pytest.fixture
async def small(store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EmbeddingStore]:
    """A store of 16 MiB, where values are old at once: a scan by itself might come while one is saved."""
    monkeypatch.setattr(shares, "_SCAN_SECONDS", math.inf)
    await within("the server to free what it had before", _freed(store))
    _, before = await store.control.execute("CONFIG", "GET", "maxmemory")
    await store.control.execute("CONFIG", "SET", "maxmemory", MEMORY)
    store.shares = StoreShares(store.topology, store.control, young=0.0)
    yield store
    # Other tests have the same server.
    await store.control.execute("CONFIG", "SET", "maxmemory", before)


async def _freed(store: EmbeddingStore) -> None:
    """A server frees large values in a thread of its own."""
    while (await store.memory()).used_bytes > MEMORY // 4:
        await asyncio.sleep(0.01)


def plans_of(name: str, count: int) -> list[ItemPlan]:
    return [make_plan(f"{name} {n}", rows=ROWS, width=WIDTH) for n in range(count)]


async def save(store: EmbeddingStore, name: str, count: int, tenant: str) -> list[ItemPlan]:
    plans = plans_of(name, count)
    for plan in plans:
        await store.save(plan, make_body(plan), ttl=600, tenant=tenant)
    await store.shares.note()
    return plans


async def held(store: EmbeddingStore, plans: list[ItemPlan]) -> int:
    """How many of these are stored; the look does not renew them."""
    return sum(await store.control.execute_all([("EXISTS", keys.embedding(plan.mm_hash)) for plan in plans]))


async def counts(store: EmbeddingStore, shard: str = "0") -> dict[str, int]:
    usage, _ = keys.usage(shard, "", "")
    found = await store.control.execute("HGETALL", usage)
    return {name.decode(): int(value) for name, value in found.items()}


async def evicted(store: EmbeddingStore) -> int:
    return (await store.memory()).evicted_keys


async def test_a_tenant_that_fills_the_store_evicts_its_own(small: EmbeddingStore, caplog) -> None:
    before = await evicted(small)
    bobs = await save(small, "bob", 12, BOB)
    with caplog.at_level(logging.INFO, logger=shares.__name__):
        alices = await save(small, "alice", 200, ALICE)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and f"tenants above their share, {ALICE} the last, have given up" in said[0]
    assert await held(small, bobs) == 12
    assert await evicted(small) == before
    kept = await held(small, alices)
    # Half of what shares divide is hers, and what bob does not use of it.
    assert kept * NBYTES > 0.4 * MEMORY - NBYTES
    # Those of one millisecond have no order.
    assert await held(small, alices[-kept - 2 :]) >= kept - 1, "the oldest go first"
    assert (await counts(small))[f"{ALICE}:embedding"] == kept * NBYTES
    loaded = await small.load(bobs[0], fresh_buffer)
    assert isinstance(loaded, Loaded) and bytes(loaded.body) == make_body(bobs[0])


async def test_an_index_outlives_the_values_that_it_counts(small: EmbeddingStore) -> None:
    await save(small, "bob", 1, BOB)
    _, index = keys.usage("0", BOB, "embedding")
    assert await small.control.execute("TTL", index) > 600


async def test_without_tenants_the_same_evicts_everybodys(small: EmbeddingStore) -> None:
    bobs = await save(small, "bob", 12, "")
    await save(small, "alice", 200, "")
    assert await held(small, bobs) < 6
    assert await counts(small) == {}


async def test_a_tenant_alone_has_all_of_it(small: EmbeddingStore) -> None:
    alices = await save(small, "alice", 120, ALICE)
    assert small.shares.deleted == 0
    assert await held(small, alices) * NBYTES > 0.8 * MEMORY


async def test_values_that_are_young_stay(small: EmbeddingStore) -> None:
    small.shares = StoreShares(small.topology, small.control, young=600.0)
    await save(small, "bob", 2, BOB)
    await save(small, "alice", 100, ALICE)
    assert small.shares.deleted == 0


async def test_a_value_in_parts_goes_with_them(
    small: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "PART_BYTES", NBYTES // 4)
    await save(small, "bob", 4, BOB)
    alices = await save(small, "alice", 100, ALICE)
    assert await evicted(small) == 0 or small.shares.deleted
    kept = await held(small, alices)
    assert kept < 100
    stored = await small.control.execute("KEYS", "ec:*")
    assert len(stored) == (kept + 4) * 5


async def test_one_save_deletes_no_more_than_a_few_times_its_own_bytes(small: EmbeddingStore) -> None:
    await small.control.execute("CONFIG", "SET", "maxmemory", 4 * MEMORY)
    await save(small, "bob", 4, BOB)
    await save(small, "alice", 60, ALICE)
    used = (await small.memory()).used_bytes
    await small.control.execute("CONFIG", "SET", "maxmemory", used + 8 * NBYTES)
    small.shares = StoreShares(small.topology, small.control, young=0.0)
    await save(small, "one more", 1, ALICE)
    assert 0 < small.shares.deleted <= 4


async def test_a_wrong_count_is_corrected_by_the_scan(small: EmbeddingStore) -> None:
    alices = await save(small, "alice", 20, ALICE)
    bobs = await save(small, "bob", 3, BOB)
    usage, index = keys.usage("0", BOB, "embedding")
    await small.control.execute("HSET", usage, f"{ALICE}:embedding", 10**12, f"{BOB}:embedding", -5)
    await small.control.execute("HSET", usage, "0123456789abcdef:embedding", 7)
    for plan in (*alices[:5], *bobs):
        await small.control.execute("DEL", keys.embedding(plan.mm_hash))
    await small.shares.scan("0")
    assert await counts(small) == {f"{ALICE}:embedding": 15 * NBYTES}
    assert not await small.control.execute("EXISTS", index)


async def test_a_value_that_is_being_saved_stays_counted_through_a_scan(small: EmbeddingStore) -> None:
    small.shares = StoreShares(small.topology, small.control, young=600.0)
    (plan,) = plans_of("under way", 1)
    await small.shares.take(ALICE, plan.mm_hash, NBYTES, 600.0)
    await small.shares.note()
    await small.shares.scan("0")
    assert await counts(small) == {f"{ALICE}:embedding": NBYTES}


async def test_what_is_being_noted_aside_is_noted_too(small: EmbeddingStore, monkeypatch) -> None:
    begun, script = asyncio.Event(), small.control.script

    async def slow(*words: Any) -> Any:
        begun.set()
        await asyncio.sleep(0.2)
        return await script(*words)

    monkeypatch.setattr(small.control, "script", slow)
    small.shares = StoreShares(small.topology, small.control)
    (plan,) = plans_of("aside", 1)
    await small.shares.take(ALICE, plan.mm_hash, NBYTES, 600.0)
    await begun.wait()
    await small.shares.note()
    assert await counts(small) == {f"{ALICE}:embedding": NBYTES}


async def test_an_index_of_many_values_is_scanned_in_steps(small: EmbeddingStore) -> None:
    await small.control.execute("CONFIG", "SET", "maxmemory", 0)
    plans = [make_plan(f"tiny {n}", rows=1, width=4) for n in range(1500)]
    for plan in plans:
        await small.save(plan, make_body(plan), ttl=600, tenant=ALICE)
    await small.shares.note()
    for plan in plans[::2]:
        await small.control.execute("DEL", keys.embedding(plan.mm_hash))
    steps = 0
    while (await counts(small))[f"{ALICE}:embedding"] != 750 * 16:
        await small.shares.scan("0")
        steps += 1
        assert steps < 30
    assert steps > 1


async def test_savers_that_know_no_tenants_save_beside_those_that_do(small: EmbeddingStore) -> None:
    old = await save(small, "old", 5, "")
    new = await save(small, "new", 5, ALICE)
    found = await small.look_up([(plan.mm_hash, NAMESPACE) for plan in (*old, *new)])
    assert found == [*old, *new]
    assert await counts(small) == {f"{ALICE}:embedding": 5 * NBYTES}


async def test_where_the_server_refuses_the_counts_values_are_saved_all_the_same(small, store_url, caplog):
    # The permissions of encoders before there were shares.
    rules = ("on", ">old", "+@all", "-@dangerous", "+info", "~ec:*", "resetchannels")
    await small.control.execute("ACL", "SETUSER", "encoder-of-old", *rules)
    old = await EmbeddingStore.connect(store_url.replace("unix://", "unix://encoder-of-old:old@"))
    plans = plans_of("old", 3)
    try:
        with caplog.at_level(logging.WARNING):
            for plan in plans:
                await old.save(plan, make_body(plan), ttl=600, tenant=ALICE)
            await until(lambda: "shares of the store are not kept" in caplog.text)
            await old.save(plans[0], make_body(plans[0]), ttl=600, tenant=ALICE)
        assert await held(small, plans) == 3
        assert caplog.text.count("shares of the store are not kept") == 1
    finally:
        await old.close()


@pytest.fixture
def replicated(tmp_path: Path) -> Iterator[tuple[StoreServer, StoreServer]]:
    """A primary of 64 MiB and its replica, which has all that the primary has."""
    options = {"repl_diskless_sync_delay": 0, "repl_timeout": 600}
    primary, replica = (StoreServer(tmp_path / name, **options) for name in ("primary", "replica"))
    try:
        primary.start()
        replica.start()
        replica.call("REPLICAOF", primary.host, primary.port)
        eventually("the replica to be in step", lambda: primary.call("WAIT", 1, 100) == 1)
        yield primary, replica
    finally:
        replica.kill()
        primary.kill()


async def test_what_waits_for_a_replica_that_lags_takes_nothing_from_the_shares(replicated) -> None:
    primary, replica = replicated
    store = await EmbeddingStore.connect(primary.url)
    store.shares = StoreShares(store.topology, store.control, young=0.0)
    try:
        bobs, alices = await save(store, "bob", 8, BOB), await save(store, "alice", 120, ALICE)
        replica.pause()
        for _ in range(64):
            primary.call("SET", "traffic", "x" * (1 << 20))
            if primary.call("INFO", "memory")["mem_total_replication_buffers"] > 32 << 20:
                break
        primary.call("DEL", "traffic")
        store.shares = StoreShares(store.topology, store.control, young=0.0)
        alices += await save(store, "one more", 1, ALICE)
        assert (await store.memory()).used_bytes > 0.9 * (64 << 20), "all would be too much for the server"
        assert store.shares.deleted == 0
        assert (await held(store, bobs), await held(store, alices)) == (8, 121)
    finally:
        await store.close()
