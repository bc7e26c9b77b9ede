"""Saves of encoder outputs into the real store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from support.data.items import NAMESPACE, fresh_buffer, make_body, make_plan
from triptych.integrations.vllm.options import ConnectorOptions
from triptych.integrations.vllm.rows import RowSaver
from triptych.store import keys
from triptych.store.bulk import Loaded


@pytest.fixture
def saver(store_url):
    made = RowSaver(ConnectorOptions(store_url, (NAMESPACE,), ttl_seconds=60))
    yield made
    made.close()


def body_of(plan: Any, copies: list[str] | None = None) -> Callable[[], memoryview]:
    def body() -> memoryview:
        if copies is not None:
            copies.append(plan.mm_hash)
        return memoryview(make_body(plan))

    return body


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_saved_item_is_a_value_like_our_encoders_values(saver, store):
    plan = make_plan()
    assert saver.save(plan, body_of(plan))
    await until(lambda: saver._used == 0)
    result = await store.load(plan, fresh_buffer)
    assert isinstance(result, Loaded)
    assert bytes(result.body) == make_body(plan)
    assert 0 < await store.control.execute("PTTL", keys.embedding(plan.mm_hash)) <= 60_000


async def test_an_item_that_is_stored_is_not_copied_and_stays_longer(saver, store):
    plan = make_plan()
    await store.save(plan, make_body(plan), ttl=60)
    await store.control.execute("PEXPIRE", keys.embedding(plan.mm_hash), 2_000)
    copies: list[str] = []
    assert saver.save(plan, body_of(plan, copies))
    await until(lambda: saver._used == 0)
    assert copies == []
    assert await store.control.execute("PTTL", keys.embedding(plan.mm_hash)) > 2_000


async def test_an_item_that_the_store_evicted_is_saved_again(saver, store):
    plan = make_plan()
    for _ in range(2):
        assert saver.save(plan, body_of(plan))
        await until(lambda: saver._used == 0)
        assert await store.control.execute("DEL", keys.embedding(plan.mm_hash)) == 1


async def test_saves_are_one_for_each_item_and_within_the_budget(store_url, store):
    options = ConnectorOptions(store_url, (NAMESPACE,), host_memory_bytes=2 * make_plan().nbytes)
    saver = RowSaver(options)
    held = threading.Event()

    def slow() -> memoryview:
        held.wait(30)
        return memoryview(make_body(make_plan()))

    assert saver.save(make_plan(), slow)
    assert not saver.save(make_plan(), slow)
    assert not saver.save(make_plan("large", rows=8), slow)
    held.set()
    await until(lambda: saver._used == 0)
    assert saver.save(make_plan("large", rows=8), body_of(make_plan("large", rows=8)))
    saver.close()
    assert not saver.save(make_plan("late"), slow)


async def test_a_shutdown_waits_for_the_saves_under_way(store_url, store):
    saver = RowSaver(ConnectorOptions(store_url, (NAMESPACE,)))
    plans = [make_plan(f"item {number}") for number in range(20)]
    for plan in plans:
        assert saver.save(plan, body_of(plan))
    saver.close()
    saver.close()
    stored = await store.look_up([(plan.mm_hash, NAMESPACE) for plan in plans])
    assert stored == plans


async def test_a_failure_to_copy_the_rows_loses_that_save_alone(saver, store, caplog):
    def broken() -> memoryview:
        raise RuntimeError("CUDA error")

    plan = make_plan()
    assert saver.save(replace(plan, mm_hash="c" * 64), broken)
    assert saver.save(plan, body_of(plan))
    await until(lambda: saver._used == 0)
    assert await store.look_up([(plan.mm_hash, NAMESPACE)]) == [plan]
    assert "unexpected: RuntimeError('CUDA error')" in caplog.text
