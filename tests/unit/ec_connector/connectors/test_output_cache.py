"""Caches of the connector: outputs, and the store in memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from support.data.items import make_plan
from triptych.base.types import EmbeddingSource, ItemPlan, MMFeature, Placement
from triptych.ec_connector.base import ECConnectorRole, ECTransferConfig, EncoderOutput, OutputCache, Presence
from triptych.ec_connector.connectors.direct_path import NotFiniteError, ServedOutputs
from triptych.ec_connector.connectors.memory import MemoryStore
from triptych.ec_connector.factory import ECConnectorFactory
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.store.codec import PendingHead, encode_head, write_id_of

NAMESPACE = "n" * 64


def output(key: str, rows: int = 1) -> EncoderOutput:
    return EncoderOutput(ItemPlan(key, NAMESPACE, "image", rows, 4, "float32", rows), torch.ones(rows, 4))


def test_the_least_recently_used_output_goes_first() -> None:
    cache = OutputCache(32)
    cache["a"], cache["b"] = output("a"), output("b")
    assert cache["a"].plan.mm_hash == "a"
    cache["c"] = output("c")
    assert list(cache) == ["a", "c"]
    assert cache.nbytes == 32


def test_a_held_output_stays_until_it_is_let_go() -> None:
    cache = OutputCache(16)
    cache["a"] = output("a")
    cache.pin("a")
    cache["b"] = output("b")
    assert list(cache) == ["a"]
    cache.pin("a")
    cache.unpin("a")
    cache["c"] = output("c", rows=2)
    assert list(cache) == ["a"]
    cache.unpin("a")
    cache["d"] = output("d")
    assert list(cache) == ["d"]


def test_a_new_output_takes_the_place_of_the_old_one() -> None:
    cache = OutputCache(64)
    cache["a"] = output("a")
    cache["a"] = output("a", rows=2)
    assert (len(cache), cache.nbytes) == (1, 32)
    del cache["a"]
    assert cache.nbytes == 0
    assert cache.get("a") is None


def test_making_room_ends_though_everything_is_held_and_asking_for_nothing_changes_nothing() -> None:
    cache = OutputCache(16)
    cache["a"] = output("a")
    cache.pin("a")
    cache["b"] = output("b", rows=9)
    assert cache.get("missing") is None
    cache.unpin("a")
    assert list(cache) == ["a"]


SIZE = 64 << 10


def served(limit: int = 1 << 20) -> ServedOutputs:
    return ServedOutputs(limit, socket="a socket", address="")


def offered(outputs: ServedOutputs, name: str) -> tuple[ItemPlan, EmbeddingSource]:
    plan = make_plan(name, rows=100, width=16)
    output = outputs.offer(plan, PendingHead(plan, ttl=60), memoryview(bytes(plan.nbytes)))
    return plan, output.source


def test_the_one_pass_makes_the_value_that_the_store_gets() -> None:
    outputs, plan = served(), make_plan("one", rows=100, width=16)
    body = memoryview(torch.randn(plan.rows, plan.width).view(torch.uint8).numpy().tobytes())
    output = outputs.offer(plan, PendingHead(plan, ttl=60), body)
    assert output is not None and outputs.get(plan) is output
    assert output.head == encode_head(plan, body, ttl=60, write_id=write_id_of(output.head))
    with outputs.reading(output.source.name):
        assert bytes(output.view) == output.head + bytes(body)


def test_what_is_not_finite_is_not_served_and_gives_its_memory_back() -> None:
    outputs, plan = served(SIZE), make_plan("one", rows=100, width=16)
    body = torch.full((plan.rows, plan.width), torch.inf).view(torch.uint8).numpy().data.cast("B")
    with pytest.raises(NotFiniteError):
        outputs.offer(plan, PendingHead(plan, ttl=60), body)
    assert outputs.get(plan) is None
    offered(outputs, "two")


def read(outputs: ServedOutputs, source: EmbeddingSource) -> bool:
    with outputs.reading(source.name) as output:
        return output is not None


@pytest.mark.parametrize("first", ["read", "stored"])
def test_what_is_read_and_stored_gives_its_memory_to_the_next_output(first: str) -> None:
    outputs = served()
    plan, source = offered(outputs, "one")
    if first == "read":
        assert read(outputs, source)
    outputs.stored(plan.mm_hash)
    if first == "stored":
        assert read(outputs, source)
    _, second = offered(outputs, "two")
    assert outputs.nbytes == SIZE
    assert not read(outputs, source) and read(outputs, second)


@pytest.mark.parametrize("used", ["not at all", "read", "stored"])
def test_what_is_not_both_read_and_stored_stays_while_there_is_room(used: str) -> None:
    outputs = served()
    plan, source = offered(outputs, "one")
    if used == "read":
        assert read(outputs, source)
    elif used == "stored":
        outputs.stored(plan.mm_hash)
    offered(outputs, "two")
    assert outputs.nbytes == 2 * SIZE
    assert read(outputs, source)


def test_what_is_being_read_again_keeps_its_bytes() -> None:
    outputs = served()
    plan, source = offered(outputs, "one")
    outputs.stored(plan.mm_hash)
    assert read(outputs, source)
    with outputs.reading(source.name) as output:
        before = bytes(output.view)
        offered(outputs, "two")
        assert bytes(output.view) == before and outputs.nbytes == 2 * SIZE


ENTRY = output("a" * 64, rows=2)
PLAN = ENTRY.plan
FEATURE = MMFeature(PLAN, Placement(0, 2))


class Request:
    request_id = "r"
    features = (FEATURE,)


@pytest.fixture(params=["memory", "redis"])
def config(request, tmp_path):
    """A transfer config; its store does not answer, for nobody should ask it."""
    url, store = f"unix://{tmp_path}/no.sock", MemoryStore()

    def make(ec_role):
        return ECTransferConfig(connector=request.param, store_url=url, store=store, ec_role=ec_role)

    return make


@pytest.mark.parametrize(("ec_role", "loads"), [("both", True), ("consumer", True), ("producer", False)])
def test_the_scheduler_of_a_producer_orders_no_load(config, ec_role, loads):
    scheduler = ECConnectorFactory.create_connector(config(ec_role), ECConnectorRole.SCHEDULER)
    scheduler.add_request(Request())
    scheduler.item_ready(PLAN.mm_hash)
    assert scheduler.has_caches(Request()) == [Presence.LOADING if loads else Presence.UNKNOWN]
    scheduler.update_state_after_alloc(Request(), 0)
    metadata = scheduler.build_connector_meta(None)
    assert (len(metadata.fetches), metadata.moves) == (int(loads), ())


def test_a_load_by_a_producer_fails_with_the_reason(config):
    worker = ECConnectorFactory.create_connector(config("producer"), ECConnectorRole.WORKER)
    cache = {}
    worker.config.store.update({PLAN.mm_hash: ENTRY})
    worker.start_load_caches(TransferMetadata(1, (Fetch(PLAN, 1),), (), ()), cache)
    (failure,) = worker.get_finished().failed
    assert failure.mm_hash == PLAN.mm_hash
    assert "producer" in failure.reason
    assert cache == {}
    worker.shutdown()


def test_a_save_by_a_consumer_is_reported_as_unsaved_with_the_reason(config):
    worker = ECConnectorFactory.create_connector(config("consumer"), ECConnectorRole.WORKER)
    worker.save_caches({PLAN.mm_hash: ENTRY}, PLAN.mm_hash)
    output = worker.get_finished()
    assert output.saved == []
    assert "consumer" in output.unsaved[PLAN.mm_hash]
    assert worker.config.store == {}
    worker.shutdown()


def test_another_role_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="ec_role 'reader': use one of both, producer, consumer"):
        ECTransferConfig(ec_role="reader")


ROW = 16


def test_outputs_that_no_load_awaits_are_evicted_before_published_ones():
    store = MemoryStore(4 * ROW)
    waiting = output("waiting")
    store.publish(waiting)
    for index in range(10):
        passing = output(f"passing-{index}")
        store.publish(passing)
        assert store.load(passing.plan) is passing
    assert store.nbytes == 4 * ROW
    assert store.load(waiting.plan) is waiting


def test_a_loaded_item_stays_while_there_is_room_and_makes_room_then():
    store = MemoryStore(2 * ROW)
    first = output("first")
    store.publish(first)
    assert store.load(first.plan) is first
    assert store.awaited_bytes == 0
    assert store.load(first.plan) is first
    store.publish(output("second"))
    store.publish(output("third"))
    assert store.load(first.plan) is None
    assert store.nbytes == 2 * ROW


def test_items_that_are_never_loaded_do_not_fill_the_store_for_ever():
    store = MemoryStore(4 * ROW)
    for index in range(100):
        store.publish(output(f"left-{index}"))
    assert store.awaited_bytes == 2 * ROW
    assert store.nbytes == 4 * ROW
    keys = list(store)
    assert keys[-1] == "left-99"


def test_one_item_stays_however_large():
    store = MemoryStore(ROW)
    large = output("large", rows=9)
    store.publish(large)
    assert store.load(large.plan) is large


def test_another_plan_or_namespace_of_a_key_is_not_what_was_asked_for():
    store = MemoryStore()
    mine = output("mine")
    store.publish(mine)
    assert store.load(dataclasses.replace(mine.plan, width=8)) is None
    assert store.load(mine.plan) is mine


async def test_a_look_up_tells_plans_and_keeps_what_it_has_found():
    store = MemoryStore(4 * ROW)
    found = output("found")
    store.publish(found)
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
