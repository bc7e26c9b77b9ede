"""A store behind a network that is slow or breaks: whole values or plain errors, and then it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from support.engine.transfers import counting_relay
from support.processes.relay import Relay
from support.waiting import until
from triptych.apps.launch import embedded_store
from triptych.apps.launch.embedded_store import EmbeddedStore
from triptych.base.errors import ConfigError
from triptych.base.types import ItemPlan
from triptych.store import codec, keys
from triptych.store.bulk import Loaded, SaveResult
from triptych.store.control import StoreUnavailable
from triptych.store.embedding_store import EmbeddingStore


@pytest.fixture
async def relayed(store_url: str, tmp_path: Path) -> AsyncIterator[tuple[Relay, EmbeddingStore]]:
    with Relay(tmp_path / "relay.sock", Path(store_url.removeprefix("unix://"))) as relay:
        store = await EmbeddingStore.connect(f"unix://{tmp_path / 'relay.sock'}")
        yield relay, store
        await store.close()


async def saved(store: EmbeddingStore, name: str) -> tuple[ItemPlan, bytes]:
    plan = make_plan(name, rows=4000, width=128)
    body = make_body(plan)
    await store.save(plan, body, ttl=60)
    return plan, body


async def whole(store: EmbeddingStore, plan: ItemPlan, body: bytes) -> None:
    """Loads the item; what is broken is mended by the second try at the latest."""
    for _ in range(2):
        with contextlib.suppress(StoreUnavailable):
            loaded = await store.load(plan, fresh_buffer)
            assert isinstance(loaded, Loaded)
            assert bytes(loaded.body) == body
            return
    raise AssertionError("the store did not answer again")


@pytest.mark.parametrize("breaking", ["cut", "half_close"])
async def test_idle_connections_that_broke_are_replaced(relayed, breaking):
    relay, store = relayed
    plan, body = await saved(store, f"idle {breaking}")
    await whole(store, plan, body)
    assert getattr(relay, breaking)() >= 2
    await whole(store, plan, body)
    assert (await store.look_up([(plan.mm_hash, plan.namespace)]))[0] is not None


@pytest.mark.parametrize("breaking", ["cut", "half_close"])
async def test_a_value_whose_connection_breaks_under_way_is_never_cut_short(relayed, breaking):
    relay, store = relayed
    plan, body = await saved(store, f"busy {breaking}")
    relay.delay = 0.02
    for _ in range(3):
        relay.answered = 0
        loading = asyncio.create_task(whole(store, plan, body))
        await until(lambda: relay.answered > len(body) // 8, "a part of the value")
        assert not loading.done()
        await asyncio.to_thread(getattr(relay, breaking))
        relay.delay = 0.0
        await loading
        relay.delay = 0.02


#: The last words of a header's SET, and of a part's.
HEADER, PART = b"\r\nNX\r\n$2\r\nPX\r\n", b"\r\n$2\r\nPX\r\n"


@pytest.mark.parametrize(
    ("size", "lost"),
    [(1 << 20, HEADER), (1 << 20, PART), (64 << 20, HEADER)],
    ids=["header of parts", "a part", "one piece"],
)
async def test_a_write_whose_reply_is_lost_leaves_a_whole_value(relayed, monkeypatch, size, lost):
    """In parts, with the reply to the header or to a part lost, and in one piece."""
    relay, store = relayed
    monkeypatch.setattr(codec, "PART_BYTES", size)
    plan = make_plan(f"reply lost {size} {lost!r}", rows=4000, width=256)
    body = make_body(plan)
    relay.lose_answer_to = lost
    await store.save(plan, body, ttl=60)
    assert relay.lost_answers == 1
    await whole(store, plan, body)
    # Later writers find a value, and what they wrote themselves goes.
    parts = await store.control.execute("KEYS", keys.embedding(plan.mm_hash) + ":*")
    assert await store.save(plan, body, ttl=60) is SaveResult.ALREADY
    assert sorted(await store.control.execute("KEYS", keys.embedding(plan.mm_hash) + ":*")) == sorted(parts)
    await whole(store, plan, body)


async def test_of_two_writers_one_of_whose_replies_is_lost_one_value_and_its_parts_stay(relayed, monkeypatch):
    relay, store = relayed
    monkeypatch.setattr(codec, "PART_BYTES", 1 << 20)
    plan = make_plan("reply lost beside another writer", rows=4000, width=256)
    body = make_body(plan)
    relay.lose_answer_to = HEADER
    await asyncio.gather(*(store.save(plan, body, ttl=60) for _ in range(4)))
    assert relay.lost_answers == 1
    parts = await store.control.execute("KEYS", keys.embedding(plan.mm_hash) + ":*")
    assert len(parts) == codec.part_count(plan.nbytes)
    await whole(store, plan, body)


async def test_it_serves_on_a_private_socket_and_leaves_nothing_running(tmp_path: Path) -> None:
    server = EmbeddedStore(tmp_path / "store", 32 << 20)
    server.start()
    pid, path = server.pid, Path(server.url.removeprefix("unix://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    store = await EmbeddingStore.connect(server.url)
    assert (await store.memory()).max_bytes == 32 << 20
    await store.close()
    server.stop()
    server.stop()
    assert not path.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did not start"):
        EmbeddedStore(tmp_path, -5).start()


def test_a_path_too_long_for_a_socket_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TMPDIR"):
        EmbeddedStore(tmp_path / ("x" * 100), 1 << 20).start()


def test_without_any_server_binary_the_remedies_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_store, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="triptych\\[embedded\\].*--store"):
        embedded_store.find_server_binary()


async def test_a_look_up_of_many_items_is_one_round_trip_and_reads_no_body(store, store_url, tmp_path):
    plans = [make_plan(f"item {n}", rows=500, width=500) for n in range(20)]
    for plan in plans[::2]:
        await store.save(plan, make_body(plan), ttl=60)
    with counting_relay(store_url, tmp_path) as (url, round_trips):
        relayed = await EmbeddingStore.connect(url)
        try:
            await relayed.ping()
            before = round_trips()
            found = await relayed.look_up([(plan.mm_hash, NAMESPACE) for plan in plans])
            assert round_trips() - before == 1
        finally:
            await relayed.close()
    assert [plan is not None for plan in found] == [True, False] * 10
