"""Leases and look-ups in the real store: an item is encoded once, whenever its owner ends."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from support.data.items import NAMESPACE, make_body, make_plan
from support.fakes.encoder_jobs import Jobs
from triptych.encoder_worker.jobs.job import JobEvent, Ready, Waiter
from triptych.encoder_worker.jobs.lease_keeper import LeaseKeeper
from triptych.encoder_worker.jobs.single_flight import SingleFlight
from triptych.registry.leases import Lease, Leases, OwnedBy
from triptych.store.embedding_store import EmbeddingStore

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


async def test_an_owner_that_ends_between_look_up_and_lease_has_encoded_for_all(
    store: EmbeddingStore,
) -> None:
    owned = await Leases(store).acquire(KEY, address="a:1", incarnation="a", term=60)
    assert isinstance(owned, Lease)
    keeper = LeaseKeeper(
        _EndsMeanwhile(store, owned), address="b:1", incarnation="b", last_progress=time.monotonic
    )
    jobs, events = Jobs(), list[JobEvent]()
    jobs.table._leases = keeper  # type: ignore[assignment]
    waiter: Waiter = jobs.waiter(KEY, events)
    flight = SingleFlight(jobs.table, store, keeper, NAMESPACE)
    await flight.end_stored([waiter.job])
    assert not events, "the item was stored before its owner ended"
    assert await flight.claim([waiter.job]) == []
    assert isinstance(events[-1], Ready) and events[-1].already_stored
    await asyncio.wait_for(keeper.close(), 30)
    again = await Leases(store).acquire(KEY, address="c:1", incarnation="c", term=60)
    assert isinstance(again, Lease), "the lease of an item that is not encoded was kept"
