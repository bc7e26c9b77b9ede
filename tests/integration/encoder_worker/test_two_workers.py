"""Two encoder workers: one lease, the same rows."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest
import torch

from support.data.items import NAMESPACE, make_body, make_plan
from support.data.pictures import picture
from support.engine.encoder_bench import Bench, Job, bench, png
from support.fakes.encoder_jobs import Jobs
from triptych.encoder_worker.jobs.job import Waiter
from triptych.encoder_worker.jobs.same_rows import SameRows
from triptych.encoder_worker.jobs.single_flight import SingleFlight
from triptych.models.base import PreparedItem
from triptych.protos.encoder_pb2 import EncodeEvent
from triptych.registry.lease_keeper import LeaseKeeper
from triptych.registry.leases import Lease, Leases, OwnedBy
from triptych.store import keys
from triptych.store.embedding_store import EmbeddingStore


async def in_the_tower(b: Bench, seed: int) -> Job:
    """A job that hangs in the worker's tower."""
    job = await Job(b, png(picture(seed))).planned()
    b.tower.open.clear()
    await job.run()
    assert await asyncio.to_thread(b.tower.entered.wait, 45)
    return job


async def test_the_second_worker_is_told_the_first_and_can_join_there(encoder, store, store_url):
    async with bench(encoder, store, store_url) as a, bench(encoder, store, store_url) as b:
        first = await in_the_tower(a, 1)
        second = await Job(b, first.media).planned()
        failed = (await second.finished()).failed
        assert (failed.owner_address, failed.retryable) == (a.address, True)
        joined = await Job(a, first.media).start()
        assert (await joined.event()).WhichOneof("body") == "planned"
        a.tower.open.set()
        events = await asyncio.gather(first.last(), joined.last())
        assert [event.WhichOneof("body") for event in events] == ["ready"] * 2
        assert (a.tower.batches, b.tower.batches) == ([1], [])


async def test_a_hung_owner_is_replaced_by_the_token_of_its_lease(encoder, store, store_url):
    async with bench(encoder, store, store_url) as a, bench(encoder, store, store_url) as b:
        first = await in_the_tower(a, 2)
        told = (await (await Job(b, first.media).planned()).finished()).failed
        retry = await Job(b, first.media, changes={"failed_lease_token": told.owner_token}).planned()
        assert (await retry.finished()).WhichOneof("body") == "ready"
        a.tower.open.set()
        assert (await first.last()).WhichOneof("body") == "ready"
        async with asyncio.timeout(45):
            while await store.control.execute("HKEYS", keys.LEASES):
                await asyncio.sleep(0.01)


async def test_a_worker_takes_what_another_has_stored_since_the_plan(encoder, store, store_url):
    async with bench(encoder, store, store_url) as a, bench(encoder, store, store_url) as b:
        waiting = await Job(b, png(picture(3))).planned()
        await (await Job(a, png(picture(3))).planned()).finished()
        assert (await waiting.finished()).ready.already_stored
        assert b.tower.batches == []


PLAN = make_plan("raced")
KEY = PLAN.mm_hash


class _EndsMeanwhile(Leases):
    """Leases whose other owner saves the item and releases it just before we ask for its lease."""

    def __init__(self, store: EmbeddingStore, owned: Lease) -> None:
        super().__init__(store)
        self._store, self._owned = store, owned

    async def acquire(self, mm_hash: str, **words: Any) -> Lease | OwnedBy:
        await self._store.save(PLAN, make_body(PLAN), ttl=60)
        assert await self.release(self._owned)
        return await super().acquire(mm_hash, **words)


async def test_an_owner_that_ends_between_look_up_and_lease_has_encoded_for_all(store):
    owned = await Leases(store).acquire(KEY, address="a:1", incarnation="a", term=60)
    assert isinstance(owned, Lease)
    keeper = LeaseKeeper(
        _EndsMeanwhile(store, owned), address="b:1", incarnation="b", last_progress=time.monotonic
    )
    jobs, events = Jobs(), list[EncodeEvent]()
    jobs.table._leases = keeper  # type: ignore[assignment]
    waiter: Waiter = jobs.waiter(KEY, events)
    flight = SingleFlight(jobs.table, store, keeper, NAMESPACE)
    await flight.end_stored([waiter.job])
    assert not events, "the item was stored before its owner ended"
    assert await flight.claim([waiter.job]) == []
    assert events[-1].ready.already_stored
    await asyncio.wait_for(keeper.close(), 30)
    again = await Leases(store).acquire(KEY, address="c:1", incarnation="c", term=60)
    assert isinstance(again, Lease), "the lease of an item that is not encoded was kept"


FIRST = make_plan(rows=2, width=4)
SECOND = dataclasses.replace(FIRST, mm_hash="9" * 64)


def prepared(pixel: int) -> PreparedItem:
    return PreparedItem(2, 2, (1, 1, 2), 1, {"pixels": torch.full((4,), pixel, dtype=torch.uint8)})


@pytest.fixture
async def same(store: EmbeddingStore) -> SameRows:
    """The first item has been encoded and saved."""
    same = SameRows(store, ttl=60.0)
    assert await same.output(FIRST, prepared(1), "a") is None
    await store.save(FIRST, make_body(FIRST), ttl=60)
    return same


async def test_an_item_of_equal_content_has_the_rows_that_are_stored(same: SameRows) -> None:
    output = await same.output(SECOND, prepared(1), "a")
    assert output is not None and output.plan == SECOND
    assert output.data.contiguous().flatten().view(torch.uint8).numpy().tobytes() == bytes(make_body(FIRST))


@pytest.mark.parametrize(("pixel", "salt"), [(2, "a"), (1, "b")], ids=["other content", "other tenant"])
async def test_other_items_have_none(same: SameRows, pixel: int, salt: str) -> None:
    assert await same.output(SECOND, prepared(pixel), salt) is None


async def test_an_item_whose_rows_are_gone_is_computed_and_is_the_one_to_read_then(same, store):
    await store.control.execute("FLUSHDB")
    assert await same.output(SECOND, prepared(1), "a") is None
    await store.save(SECOND, make_body(SECOND), ttl=60)
    assert await same.output(FIRST, prepared(1), "a") is not None


async def test_an_error_of_the_search_leaves_the_item_to_the_tower(same, store, monkeypatch):
    def broken(*args: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(store, "load", broken)
    assert await same.output(SECOND, prepared(1), "a") is None
