"""Before the tower: stored items are answered, items of other workers sent there, the rest claimed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.fakes.encoder_jobs import NAMESPACE, FakeStore, Jobs
from triptych.encoder_worker.jobs import single_flight
from triptych.encoder_worker.jobs.job import EncodeJob, Failed, JobEvent, Ready
from triptych.encoder_worker.jobs.loop import BackgroundTasks
from triptych.encoder_worker.jobs.single_flight import SingleFlight
from triptych.registry.leases import OwnedBy
from triptych.store.control import StoreUnavailable


class Flights:
    def __init__(self) -> None:
        jobs = Jobs()
        self.store, self.keeper, self.jobs = FakeStore(), jobs.keeper, jobs.table
        keeper: Any = self.keeper
        self.flight = SingleFlight(self.jobs, self.store, keeper, NAMESPACE)
        self.events: dict[str, list[JobEvent]] = {}
        self._waiter = jobs.waiter

    def job(self, key: str, **changes: str) -> EncodeJob:
        return self._waiter(key, self.events.setdefault(key, []), **changes).job


async def test_stored_items_are_answered_and_the_others_claimed() -> None:
    f = Flights()
    stored, fresh = f.job("stored"), f.job("fresh")
    f.store.stored = {"stored"}
    assert await f.flight.claim([stored, fresh]) == [fresh]
    end = f.events["stored"][-1]
    assert isinstance(end, Ready) and end.already_stored
    assert f.keeper.held == ["fresh"]
    assert f.jobs.open_jobs() == [fresh]


async def test_a_damaged_item_is_encoded_though_it_is_stored() -> None:
    f = Flights()
    f.store.stored = {"a"}
    job = f.job("a", damaged_digest="d" * 40)
    assert await f.flight.claim([job]) == [job]


async def test_an_item_leased_by_another_worker_fails_with_its_address() -> None:
    f = Flights()
    f.keeper.owners = {"a": OwnedBy("other:1", "x", "token")}
    assert await f.flight.claim([f.job("a")]) == []
    end = f.events["a"][-1]
    assert isinstance(end, Failed) and end.retryable
    assert (end.owner_address, end.owner_token) == ("other:1", "token")


@pytest.mark.parametrize("error", [None, StoreUnavailable("gone")])
async def test_items_are_claimed_when_the_store_does_not_answer(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single_flight, "LOOK_UP_SECONDS", 0.01)
    f = Flights()
    f.store.error, f.store.delay = error, 0.0 if error else 60.0
    job = f.job("a")
    assert await f.flight.claim([job]) == [job]


async def test_a_job_without_a_waiter_is_forgotten() -> None:
    f = Flights()
    job = f.job("a")
    job.waiters.clear()
    assert await f.flight.claim([job]) == []
    assert len(f.jobs) == 0
    assert f.keeper.held == []


async def test_tasks_run_and_those_left_are_cancelled() -> None:
    tasks, ended = BackgroundTasks(), list[str]()

    async def work(name: str, seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(name)

    tasks.start(work("short", 0))
    tasks.start(work("long", 60))
    await asyncio.sleep(0.01)
    assert ended == ["short"]
    await tasks.cancel()
    assert ended == ["short", "long"]
