from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from support.data.items import make_body, make_plan
from support.engine.transfers import mute_server, wait_for
from support.matrix import matrix
from triptych.base.types import ItemPlan
from triptych.ec_connector.base import ECTransferConfig, EncoderOutput
from triptych.ec_connector.connectors.host_buffers import DeviceCopier
from triptych.ec_connector.connectors.redis import RedisConnectorWorker
from triptych.ec_connector.metadata import Fetch, LoadId, TransferMetadata
from triptych.store import keys
from triptych.store.bulk import Loaded
from triptych.store.embedding_store import EmbeddingStore

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture
def worker(store: EmbeddingStore, store_url: str) -> Iterator[RedisConnectorWorker]:
    made = RedisConnectorWorker(ECTransferConfig(store_url=store_url))
    yield made
    made.shutdown()


def entry(plan: ItemPlan) -> EncoderOutput:
    values = torch.arange(plan.rows * plan.width, dtype=torch.float32).reshape(plan.rows, plan.width)
    return EncoderOutput(plan, (values / 7).to(DTYPES[plan.dtype]))


def fetch_and_move(worker: RedisConnectorWorker, plan: ItemPlan, generation: int = 1) -> EncoderOutput:
    cache: dict[str, EncoderOutput] = {}
    worker.start_load_caches(TransferMetadata(1, fetches=(Fetch(plan, generation),)), cache)
    wait_for(worker, lambda out: out.fetched)
    assert not cache
    worker.start_load_caches(TransferMetadata(2, moves=(LoadId(plan.mm_hash, generation),)), cache)
    assert wait_for(worker, lambda out: out.loaded).loaded == [plan.mm_hash]
    return cache[plan.mm_hash]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("rows,width", matrix([(700, 1024), (0, 64), (5, 64), (3, 4 * 64)], quick=2))
def test_tensors_survive_the_round_trip(worker, dtype, rows, width):
    saved = entry(make_plan(f"{dtype} {rows} {width}", rows=rows, width=width, dtype=dtype))
    worker.save_caches({saved.plan.mm_hash: saved}, saved.plan.mm_hash)
    assert wait_for(worker, lambda out: out.saved).saved == [saved.plan.mm_hash]
    loaded = fetch_and_move(worker, saved.plan)
    assert loaded.plan == saved.plan
    assert loaded.data.dtype == DTYPES[dtype]
    assert loaded.data.is_contiguous()
    assert torch.equal(loaded.data, saved.data)


def test_a_save_keeps_its_tensor_when_the_cache_lets_it_go(worker: RedisConnectorWorker) -> None:
    saved = entry(make_plan(rows=2000, width=1024))
    expected = saved.data.clone()
    cache = {saved.plan.mm_hash: saved}
    worker.save_caches(cache, saved.plan.mm_hash)
    cache.clear()
    plan = saved.plan
    del saved
    wait_for(worker, lambda out: out.saved)
    assert torch.equal(fetch_and_move(worker, plan).data, expected)


async def test_a_damaged_item_fails_with_the_digest_that_lets_a_save_replace_it(worker, store):
    item = entry(make_plan())
    await store.control.execute("SET", keys.embedding(item.plan.mm_hash), b"rubbish" * 9)
    worker.start_load_caches(TransferMetadata(1, fetches=(Fetch(item.plan, 1),)), {})
    (failure,) = wait_for(worker, lambda out: out.failed).failed
    worker.save_caches({item.plan.mm_hash: item}, item.plan.mm_hash, failure.damaged_digest)
    wait_for(worker, lambda out: out.saved)
    assert torch.equal(fetch_and_move(worker, item.plan, 2).data, item.data)


def test_an_item_that_is_resident_is_loaded_without_a_host_copy(worker: RedisConnectorWorker) -> None:
    item = entry(make_plan())
    cache = {item.plan.mm_hash: item}
    worker.start_load_caches(TransferMetadata(1, moves=(LoadId(item.plan.mm_hash, 1),)), cache)
    assert wait_for(worker, lambda out: out.loaded).loaded == [item.plan.mm_hash]
    assert cache[item.plan.mm_hash] is item


def test_a_move_without_a_host_copy_is_a_failed_load(worker: RedisConnectorWorker) -> None:
    cache: dict[str, EncoderOutput] = {}
    worker.start_load_caches(TransferMetadata(1, moves=(LoadId(make_plan().mm_hash, 1),)), cache)
    (failure,) = wait_for(worker, lambda out: out.failed).failed
    assert "gone" in failure.reason
    assert not cache


def test_dropped_host_copies_give_their_memory_back(worker: RedisConnectorWorker) -> None:
    item = entry(make_plan())
    worker.save_caches({item.plan.mm_hash: item}, item.plan.mm_hash)
    wait_for(worker, lambda out: out.saved)
    loaded = fetch_and_move(worker, item.plan)
    assert worker.host_bytes == item.plan.nbytes
    worker.start_load_caches(TransferMetadata(3, drops=(LoadId(item.plan.mm_hash, 1),)), {})
    wait_for(worker, lambda _: worker.host_bytes == 0)
    assert torch.equal(loaded.data, item.data)


class LateCopier(DeviceCopier):
    """As a device whose copies end when the test says so, and fail when it says so."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.ended = threading.Event()
        self.error: Exception | None = None

    def to_device(
        self, pieces: Sequence[torch.Tensor], plan: ItemPlan
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        whole = super().to_device(pieces, plan)[0]
        copy = torch.zeros_like(whole)

        def wait() -> None:
            assert self.ended.wait(20)
            if self.error is not None:
                raise self.error
            copy.copy_(whole)

        return copy, wait


def moving(worker: RedisConnectorWorker, item: EncoderOutput, cache: dict[str, EncoderOutput]) -> LateCopier:
    """Begins the move of an item that is fetched; the copier that will end it."""
    copier = LateCopier()
    worker._loads._copier = copier
    worker.save_caches({item.plan.mm_hash: item}, item.plan.mm_hash)
    wait_for(worker, lambda out: out.saved)
    worker.start_load_caches(TransferMetadata(1, fetches=(Fetch(item.plan, 1),)), cache)
    wait_for(worker, lambda out: out.fetched)
    worker.start_load_caches(TransferMetadata(2, moves=(LoadId(item.plan.mm_hash, 1),)), cache)
    return copier


def test_an_item_is_in_the_cache_once_it_is_whole_and_its_host_copy_is_kept_until_then(worker):
    item, cache = entry(make_plan()), dict[str, EncoderOutput]()
    copier = moving(worker, item, cache)
    worker.start_load_caches(TransferMetadata(3, drops=(LoadId(item.plan.mm_hash, 1),)), cache)
    assert worker.get_finished().loaded == []
    assert not cache, "nobody can read what is not whole"
    assert worker.host_bytes == item.plan.nbytes, "it is being read"
    copier.ended.set()
    wait_for(worker, lambda out: out.loaded)
    assert torch.equal(cache[item.plan.mm_hash].data, item.data)
    wait_for(worker, lambda _: worker.host_bytes == 0)


@pytest.mark.parametrize("error", [RuntimeError("no memory"), ValueError("of any kind")])
def test_a_copy_that_fails_late_leaves_nothing_in_the_cache(worker, error):
    item, cache = entry(make_plan()), dict[str, EncoderOutput]()
    copier = moving(worker, item, cache)
    copier.error = error
    copier.ended.set()
    (failure,) = wait_for(worker, lambda out: out.failed).failed
    assert failure.mm_hash == item.plan.mm_hash and str(error) in failure.reason
    assert not cache
    worker.start_load_caches(TransferMetadata(3, drops=(LoadId(item.plan.mm_hash, 1),)), cache)
    wait_for(worker, lambda _: worker.host_bytes == 0)


def test_fetches_wait_for_host_memory_and_go_on_when_it_is_given_back(store, store_url):
    items = [entry(make_plan(f"item {n}")) for n in range(3)]
    limit = items[0].plan.nbytes
    worker = RedisConnectorWorker(ECTransferConfig(store_url=store_url, host_buffer_bytes=limit))
    try:
        for item in items:
            worker.save_caches({item.plan.mm_hash: item}, item.plan.mm_hash)
        wait_for(worker, lambda out: len(out.saved) == 3)
        fetches = tuple(Fetch(item.plan, n) for n, item in enumerate(items))
        worker.start_load_caches(TransferMetadata(1, fetches=fetches), {})
        for n, item in enumerate(items):
            out = wait_for(worker, lambda out: out.fetched)
            assert list(out.fetched) == [item.plan.mm_hash]
            assert worker.host_bytes == limit
            worker.start_load_caches(TransferMetadata(2, drops=(LoadId(item.plan.mm_hash, n),)), {})
        wait_for(worker, lambda _: worker.host_bytes == 0)
    finally:
        worker.shutdown()


def test_an_item_above_the_host_memory_fails_at_once_and_says_so(store, store_url):
    worker = RedisConnectorWorker(
        ECTransferConfig(store_url=store_url, host_buffer_bytes=make_plan().nbytes - 1)
    )
    try:
        worker.start_load_caches(TransferMetadata(1, fetches=(Fetch(make_plan(), 1),)), {})
        (failure,) = wait_for(worker, lambda out: out.failed).failed
        assert "host memory" in failure.reason
    finally:
        worker.shutdown()


def test_hung_transfers_end_at_their_timeouts(tmp_path: Path) -> None:
    with mute_server(tmp_path) as url:
        config = ECTransferConfig(store_url=url, load_timeout=0.2, save_timeout=0.2)
        worker = RedisConnectorWorker(config)
        try:
            item = entry(make_plan())
            worker.start_load_caches(TransferMetadata(1, fetches=(Fetch(item.plan, 1),)), {})
            out = wait_for(worker, lambda out: out.failed)
            assert "0.2 s" in out.failed[0].reason
            assert out.missing == []
            worker.save_caches({item.plan.mm_hash: item}, item.plan.mm_hash)
            out = wait_for(worker, lambda out: out.unsaved)
            assert "0.2 s" in out.unsaved[item.plan.mm_hash]
            assert worker.host_bytes == 0
        finally:
            worker.shutdown()


def test_a_dropped_load_is_never_reported_and_a_later_one_of_its_key_is(worker):
    item = entry(make_plan(rows=2000, width=1024))
    key = item.plan.mm_hash
    worker.save_caches({key: item}, key)
    wait_for(worker, lambda out: out.saved)
    for generation in range(1, 40, 2):
        worker.start_load_caches(TransferMetadata(1, fetches=(Fetch(item.plan, generation),)), {})
        orders = TransferMetadata(
            2, drops=(LoadId(key, generation),), fetches=(Fetch(item.plan, generation + 1),)
        )
        worker.start_load_caches(orders, {})
        out = wait_for(worker, lambda out: out.fetched or out.failed)
        assert out.generations == {key: generation + 1}
        assert not out.failed
        worker.start_load_caches(TransferMetadata(3, drops=(LoadId(key, generation + 1),)), {})
    wait_for(worker, lambda _: worker.host_bytes == 0)


def test_a_load_that_had_come_before_it_was_dropped_is_not_reported(worker: RedisConnectorWorker) -> None:
    item, came = entry(make_plan()), threading.Event()
    key = item.plan.mm_hash
    worker.save_caches({key: item}, key)
    wait_for(worker, lambda out: out.saved)
    worker._reports.on_progress = came.set
    worker.start_load_caches(TransferMetadata(1, fetches=(Fetch(item.plan, 1),)), {})
    assert came.wait(20.0)
    worker.start_load_caches(TransferMetadata(2, drops=(LoadId(key, 1),)), {})
    assert not worker.get_finished().fetched
    wait_for(worker, lambda _: worker.host_bytes == 0)


async def test_a_cancelled_read_does_not_poison_the_next_one(store: EmbeddingStore) -> None:

    plans = [make_plan(f"item {n}", rows=1500 + n, width=1024) for n in range(4)]
    bodies = {plan.mm_hash: make_body(plan) for plan in plans}
    for plan in plans:
        await store.save(plan, bodies[plan.mm_hash], ttl=60)
    started = 0

    for turn in range(40):
        victim, other = plans[turn % 4], plans[(turn + 1) % 4]
        receiving = asyncio.Event()

        def into(nbytes: int, receiving: asyncio.Event = receiving) -> memoryview:
            receiving.set()
            return memoryview(bytearray(nbytes))

        load = asyncio.create_task(store.load(victim, into))
        if turn % 2:
            await receiving.wait()
            started += not load.done()
        else:
            await asyncio.sleep(0)
        load.cancel()
        result = await store.load(other, lambda n: memoryview(bytearray(n)))
        assert isinstance(result, Loaded)
        assert bytes(result.body) == bodies[other.mm_hash]
        await asyncio.gather(load, return_exceptions=True)
    assert started > 10


def test_a_plan_of_another_shape_is_a_failed_load(worker: RedisConnectorWorker) -> None:
    item = entry(make_plan(rows=8))
    worker.save_caches({item.plan.mm_hash: item}, item.plan.mm_hash)
    wait_for(worker, lambda out: out.saved)
    other = dataclasses.replace(item.plan, rows=4, length=4)
    worker.start_load_caches(TransferMetadata(1, fetches=(Fetch(other, 1),)), {})
    (failure,) = wait_for(worker, lambda out: out.failed).failed
    assert failure.damaged_digest


def test_shutdown_ends_transfers_and_may_be_called_again(store_url: str) -> None:
    worker = RedisConnectorWorker(ECTransferConfig(store_url=store_url))
    plans = [make_plan(f"item {n}") for n in range(20)]
    worker.start_load_caches(TransferMetadata(1, fetches=tuple(Fetch(plan, 1) for plan in plans)), {})
    worker.shutdown()
    worker.shutdown()
    assert worker.get_finished().fetched == {}
