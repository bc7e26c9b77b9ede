"""The store inside a process: bounded in bytes, and true to what is promised of published items."""

from __future__ import annotations

import dataclasses

import torch

from triptych.base.types import ItemPlan
from triptych.ec_connector.base import ECConnectorRole, ECTransferConfig, EncoderOutput
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.ec_connector.factory import ECConnectorFactory
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata

NAMESPACE = "n" * 64
ROW = 16


def output(key: str, rows: int = 1) -> EncoderOutput:
    return EncoderOutput(ItemPlan(key, NAMESPACE, "image", rows, 4, "float32", rows), torch.ones(rows, 4))


def published(store: MemoryStore, *outputs: EncoderOutput) -> None:
    for one in outputs:
        store.publish(one)


def test_outputs_that_no_load_awaits_are_evicted_before_published_ones():
    store = MemoryStore(4 * ROW)
    waiting = output("waiting")
    published(store, waiting)
    for index in range(10):
        passing = output(f"passing-{index}")
        published(store, passing)
        assert store.load(passing.plan) is passing
    assert store.nbytes == 4 * ROW
    assert store.load(waiting.plan) is waiting


def test_a_loaded_item_stays_while_there_is_room_and_makes_room_then():
    store = MemoryStore(2 * ROW)
    first = output("first")
    published(store, first)
    assert store.load(first.plan) is first
    assert store.awaited_bytes == 0
    assert store.load(first.plan) is first
    published(store, output("second"), output("third"))
    assert store.load(first.plan) is None
    assert store.nbytes == 2 * ROW


def test_items_that_are_never_loaded_do_not_fill_the_store_for_ever():
    store = MemoryStore(4 * ROW)
    published(store, *(output(f"left-{index}") for index in range(100)))
    assert store.awaited_bytes == 2 * ROW
    assert store.nbytes == 4 * ROW
    keys = list(store)
    assert keys[-1] == "left-99"


def test_one_item_stays_however_large():
    store = MemoryStore(ROW)
    large = output("large", rows=9)
    published(store, large)
    assert store.load(large.plan) is large


def test_another_plan_or_namespace_of_a_key_is_not_what_was_asked_for():
    store = MemoryStore()
    mine = output("mine")
    published(store, mine)
    assert store.load(dataclasses.replace(mine.plan, width=8)) is None
    assert store.load(mine.plan) is mine


async def test_a_look_up_tells_plans_and_keeps_what_it_has_found():
    store = MemoryStore(4 * ROW)
    found = output("found")
    published(store, found)
    store.load(found.plan)
    asked = [("found", NAMESPACE), ("found", "m" * 64), ("gone", NAMESPACE)]
    assert await store.look_up(asked) == [found.plan, None, None]
    assert store.awaited_bytes == ROW


def test_from_save_to_cache_a_value_is_the_same_tensor():
    store = MemoryStore()
    config = ECTransferConfig(connector="memory", store=store)
    worker = ECConnectorFactory.create_connector(config, ECConnectorRole.WORKER)
    made, cache = output("a" * 64), {}
    worker.save_caches({made.plan.mm_hash: made}, made.plan.mm_hash)
    copy = LoadId(made.plan.mm_hash, 1)
    worker.start_load_caches(TransferMetadata(1, (Fetch(made.plan, 1),), (copy,)), cache)
    assert cache[made.plan.mm_hash].data is made.data
    assert worker.get_finished().loaded == [made.plan.mm_hash]
    store.clear()
    assert store.awaited_bytes == 0
    worker.shutdown()
