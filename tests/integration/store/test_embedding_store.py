from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from support.engine.transfers import mute_server
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base.errors import InvalidRequest
from triptych.base.types import WorkerInfo
from triptych.registry.leases import Lease, Leases
from triptych.registry.registry import Registry
from triptych.store import codec, keys
from triptych.store.bulk import Loaded, Missing, SaveResult, ScatterBuffer
from triptych.store.control import StoreFull, StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore
from triptych.store.topology.location import parse_store


async def test_a_saved_item_is_loaded_byte_for_byte(store: EmbeddingStore) -> None:
    plan = make_plan(rows=1000, width=512)
    body = make_body(plan)
    assert await store.save(plan, body, ttl=60) is SaveResult.STORED
    memory = fresh_buffer(plan.nbytes)
    asked: list[int] = []
    loaded = await store.load(plan, lambda nbytes: asked.append(nbytes) or memory)  # type: ignore[func-returns-value]
    assert isinstance(loaded, Loaded)
    assert bytes(loaded.body) == body
    assert loaded.body is memory
    assert asked == [plan.nbytes], "the head of the value needs no room beside the item"


@pytest.mark.parametrize("part_bytes", [codec.PART_BYTES, 5000], ids=["whole", "split"])
@pytest.mark.parametrize("sizes", [(1, 6999), (3500, 3500), (7, 4993, 1, 1999)])
async def test_a_value_is_received_into_memory_in_pieces(store, monkeypatch, part_bytes, sizes):
    monkeypatch.setattr(codec, "PART_BYTES", part_bytes)
    plan = make_plan(rows=50, width=35)
    body = make_body(plan)
    await store.save(plan, body, ttl=60)
    memory = ScatterBuffer([fresh_buffer(size) for size in sizes])
    loaded = await store.load(plan, lambda nbytes: memory)
    assert isinstance(loaded, Loaded)
    assert loaded.body is memory
    assert b"".join(memory.pieces) == body


async def test_a_second_save_keeps_the_first_value_and_renews_its_ttl(store: EmbeddingStore) -> None:
    plan = make_plan()
    await store.save(plan, make_body(plan, 1), ttl=60)
    await store.control.execute("EXPIRE", keys.embedding(plan.mm_hash), 5)
    assert await store.save(plan, make_body(plan, 2), ttl=60) is SaveResult.ALREADY
    loaded = await store.load(plan, fresh_buffer)
    assert isinstance(loaded, Loaded)
    assert bytes(loaded.body) == make_body(plan, 1)
    assert await store.control.execute("TTL", keys.embedding(plan.mm_hash)) > 50


async def test_a_look_up_gives_the_plans_of_stored_items_in_order(store: EmbeddingStore) -> None:
    here = dataclasses.replace(make_plan("here"), runs=((1, 3), (5, 4)), length=10)
    await store.save(here, make_body(here), ttl=60)
    absent = make_plan("absent")
    found = await store.look_up(
        [(absent.mm_hash, NAMESPACE), (here.mm_hash, NAMESPACE), (here.mm_hash, "another namespace")]
    )
    assert found == [None, here, None]


async def test_a_look_up_renews_the_ttl_that_the_writer_chose(store: EmbeddingStore) -> None:
    plan = make_plan()
    await store.save(plan, make_body(plan), ttl=1000)
    await store.control.execute("EXPIRE", keys.embedding(plan.mm_hash), 5)
    await store.look_up([(plan.mm_hash, NAMESPACE)])
    assert 900 < await store.control.execute("TTL", keys.embedding(plan.mm_hash)) <= 1000


async def test_keys_other_than_64_hex_characters_are_refused(store: EmbeddingStore) -> None:
    with pytest.raises(InvalidRequest, match="64 lower-case hex"):
        await store.look_up([("../escaped", NAMESPACE)])


async def test_metadata_that_does_not_fit_the_header_is_refused_at_save(store: EmbeddingStore) -> None:
    runs = tuple((2 * n, 1) for n in range(5000))
    plan = dataclasses.replace(make_plan(rows=5000, width=1), runs=runs, length=10000)
    with pytest.raises(InvalidRequest, match="too many runs"):
        await store.save(plan, make_body(plan), ttl=60)


async def test_a_large_value_travels_in_parts_that_outlive_the_header(store, monkeypatch):
    monkeypatch.setattr(codec, "PART_BYTES", 1 << 20)
    plan = make_plan(rows=1000, width=900)
    body = make_body(plan)
    await store.save(plan, body, ttl=100)
    names = await store.control.execute("KEYS", keys.embedding(plan.mm_hash) + ":*")
    assert len(names) == 4
    for name in names:
        assert await store.control.execute("TTL", name) > 200
    assert await store.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
    loaded = await store.load(plan, fresh_buffer)
    assert isinstance(loaded, Loaded)
    assert bytes(loaded.body) == body


async def test_a_changed_byte_in_a_part_of_a_large_value_is_found(store, monkeypatch):
    monkeypatch.setattr(codec, "PART_BYTES", 1 << 20)
    plan = make_plan(rows=1000, width=900)
    await store.save(plan, make_body(plan), ttl=100)
    *_, name = await store.control.execute("KEYS", keys.embedding(plan.mm_hash) + ":*")
    was = (await store.control.execute("GETRANGE", name, 1000, 1000))[0]
    await store.control.execute("SETRANGE", name, 1000, bytes([was ^ 1]))
    loaded = await store.load(plan, fresh_buffer)
    assert isinstance(loaded, Missing)
    assert "checksum" in loaded.reason
    assert await store.save(plan, make_body(plan), ttl=100, damaged_digest=loaded.damaged_digest) is (
        SaveResult.REPLACED
    )
    assert isinstance(await store.load(plan, fresh_buffer), Loaded)


async def test_a_large_value_that_lost_a_part_is_missing_and_can_be_replaced(store, monkeypatch):
    monkeypatch.setattr(codec, "PART_BYTES", 1 << 20)
    plan = make_plan(rows=1000, width=900)
    body = make_body(plan)
    await store.save(plan, body, ttl=100)
    (name, *_) = await store.control.execute("KEYS", keys.embedding(plan.mm_hash) + ":*")
    await store.control.execute("DEL", name)
    missing = await store.load(plan, fresh_buffer)
    assert isinstance(missing, Missing)
    assert await store.look_up([(plan.mm_hash, NAMESPACE)]) == [None]
    result = await store.save(plan, body, ttl=100, damaged_digest=missing.damaged_digest)
    assert result is SaveResult.REPLACED
    assert isinstance(await store.load(plan, fresh_buffer), Loaded)


async def test_the_parts_of_a_save_that_came_second_are_removed(store, monkeypatch):
    monkeypatch.setattr(codec, "PART_BYTES", 1 << 20)
    plan = make_plan(rows=1000, width=900)
    await store.save(plan, make_body(plan), ttl=100)
    assert await store.save(plan, make_body(plan), ttl=100) is SaveResult.ALREADY
    assert len(await store.control.execute("KEYS", "ec:*")) == 5


async def test_the_epoch_stays_until_a_flush(store: EmbeddingStore) -> None:
    before = await store.epoch()
    assert await store.epoch() == before
    await store.control.execute("FLUSHALL")
    assert await store.epoch() != before


async def test_memory_tells_budget_and_policy(store: EmbeddingStore) -> None:
    memory = await store.memory()
    assert memory.max_bytes == 512 << 20
    assert 0 < memory.used_bytes < memory.max_bytes
    assert memory.policy == "volatile-lru"


async def test_eight_loads_at_once_do_not_mix(store: EmbeddingStore) -> None:
    plans = [make_plan(f"item {n}", rows=200 + n, width=512) for n in range(24)]
    await asyncio.gather(*(store.save(plan, make_body(plan), ttl=60) for plan in plans))
    for plan, loaded in zip(
        plans, await asyncio.gather(*(store.load(plan, fresh_buffer) for plan in plans)), strict=True
    ):
        assert isinstance(loaded, Loaded)
        assert bytes(loaded.body) == make_body(plan)


async def test_a_store_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="not reachable"):
        await EmbeddingStore.connect(f"unix://{tmp_path}/none.sock", timeout=1)


async def test_a_store_that_hangs_is_unavailable_at_its_timeout(tmp_path: Path) -> None:
    with mute_server(tmp_path) as url:
        with pytest.raises(StoreUnavailable, match="not reachable"):
            await EmbeddingStore.connect(url, timeout=0.2)
        store = EmbeddingStore(parse_store(url), 0.2)
        plan = make_plan()
        assert not await store.ping()
        with pytest.raises(StoreUnavailable, match="hangs"):
            await store.load(plan, fresh_buffer)
        with pytest.raises(StoreUnavailable, match="hangs"):
            await store.save(plan, make_body(plan), ttl=60)
        await store.close()


async def test_a_store_with_a_password_is_used_by_all_its_connections(tmp_path: Path) -> None:
    server = EmbeddedStore(tmp_path, 64 << 20)
    server.start()
    plain = await EmbeddingStore.connect(server.url)
    plan = make_plan()
    try:
        await plain.control.execute("CONFIG", "SET", "requirepass", "secret")
        with pytest.raises(StoreUnavailable):
            await EmbeddingStore.connect(server.url)
        path = server.url.removeprefix("unix://")
        store = await EmbeddingStore.connect(f"unix://:secret@{path}?db=3")
        await store.save(plan, make_body(plan), ttl=60)
        assert isinstance(await store.load(plan, fresh_buffer), Loaded)
        await store.control.execute("CONFIG", "SET", "requirepass", "other")
        await store.control.execute("CLIENT", "KILL", "SKIPME", "no")
        with pytest.raises(StoreUnavailable):
            await store.load(plan, fresh_buffer)
        with pytest.raises(StoreUnavailable):
            await store.save(plan, make_body(plan), ttl=60)
        await store.close()
    finally:
        await plain.close()
        server.stop()


async def test_after_a_kill_and_restart_the_same_connection_serves_again(tmp_path: Path) -> None:
    server = EmbeddedStore(tmp_path, 64 << 20)
    server.start()
    store = await EmbeddingStore.connect(server.url, timeout=2)
    plan = make_plan()
    try:
        await store.save(plan, make_body(plan), ttl=60)
        assert isinstance(await store.load(plan, fresh_buffer), Loaded)
        server.stop()
        with pytest.raises(StoreUnavailable):
            await store.load(plan, fresh_buffer)
        with pytest.raises(StoreUnavailable):
            await store.look_up([(plan.mm_hash, NAMESPACE)])
        with pytest.raises(StoreUnavailable):
            await store.save(plan, make_body(plan), ttl=60)
        assert not await store.ping()
        server.start()
        assert await store.ping()
        assert await store.look_up([(plan.mm_hash, NAMESPACE)]) == [None]
        assert await store.save(plan, make_body(plan), ttl=60) is SaveResult.STORED
        assert isinstance(await store.load(plan, fresh_buffer), Loaded)
    finally:
        await store.close()
        server.stop()


async def test_four_budgets_of_embeddings_evict_no_lease_and_no_registration(tmp_path: Path) -> None:
    budget = 24 << 20
    server = EmbeddedStore(tmp_path, budget)
    server.start()
    store = await EmbeddingStore.connect(server.url)
    try:
        registry, leases = Registry(store), Leases(store)
        for n in range(50):
            await registry.register(WorkerInfo(f"h:{n}", "encoder", "i", "k", "m"), term=600)
        held = [
            await leases.acquire(make_plan(f"lease {n}").mm_hash, address="a", incarnation="i", term=600)
            for n in range(50)
        ]
        plans = [make_plan(f"item {n}", rows=256, width=1024) for n in range(4 * budget >> 20)]
        for plan in plans:
            await store.save(plan, bytes(plan.nbytes), ttl=3600)
        assert len(await registry.workers()) == 50
        for lease in held:
            assert isinstance(lease, Lease)
            assert await leases.renew(lease, 600)
        found = await store.look_up([(plan.mm_hash, NAMESPACE) for plan in plans])
        assert 0 < sum(plan is not None for plan in found) < len(plans)
    finally:
        await store.close()
        server.stop()


async def test_a_value_above_the_stores_budget_is_refused_as_full(tmp_path: Path) -> None:
    server = EmbeddedStore(tmp_path, 8 << 20)
    server.start()
    store = await EmbeddingStore.connect(server.url)
    plan = make_plan(rows=4096, width=1024)
    try:
        with pytest.raises(StoreFull, match="no room"):
            await store.save(plan, bytes(plan.nbytes), ttl=60)
        assert isinstance(await store.load(plan, fresh_buffer), Missing)
    finally:
        await store.close()
        server.stop()


async def test_a_jump_of_the_servers_clock_is_found_by_the_next_look_at_the_epoch(store, monkeypatch):
    await store.epoch()
    plain = store.control.script

    async def later(*words: object) -> list[object]:
        word, seconds, micros = await plain(*words)
        return [word, int(seconds) + 3600, micros]

    assert store.clock_jumps == 0
    monkeypatch.setattr(store.control, "script", later)
    await store.epoch()
    assert store.clock_jumps == 1
