"""Leases of items, and who encodes one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from support.fakes.encoder_jobs import NAMESPACE, FakeStore, Jobs
from support.waiting import until
from triptych.encoder_worker.jobs import single_flight
from triptych.encoder_worker.jobs.job import EncodeJob
from triptych.encoder_worker.jobs.loop import BackgroundTasks
from triptych.encoder_worker.jobs.single_flight import SingleFlight
from triptych.registry.lease_keeper import LeaseKeeper
from triptych.registry.leases import Lease, OwnedBy
from triptych.store.control import StoreUnavailable

TERM = 0.03


class FakeLeases:
    """Answers `acquire` from a list and counts the rest."""

    def __init__(self, *answers: Lease | OwnedBy | Exception) -> None:
        self.answers = list(answers)
        self.replaced: list[str] = []
        self.renewed = 0
        self.released: list[Lease] = []

    async def acquire(self, mm_hash: str, *, replace_token: str, **_: Any) -> Lease | OwnedBy:
        self.replaced.append(replace_token)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def renew(self, lease: Lease, term: float) -> bool:
        self.renewed += 1
        return True

    async def release(self, lease: Lease) -> bool:
        self.released.append(lease)
        return True


def keeper(leases: Any, *, progress_age: float = 0.0) -> LeaseKeeper:
    return LeaseKeeper(
        leases,
        address="me:1",
        incarnation="now",
        last_progress=lambda: time.monotonic() - progress_age,
        term=TERM,
    )


def later() -> float:
    return time.monotonic() + 60


async def test_another_live_owner_is_named() -> None:
    owner = OwnedBy("other:1", "x", "t")
    leases = FakeLeases(owner)
    assert await keeper(leases).acquire("k", deadline=later, failed_token="f") == owner
    assert leases.replaced == ["f"]


async def test_a_lease_that_this_address_left_behind_is_replaced() -> None:
    leases = FakeLeases(OwnedBy("me:1", "now", "old"), Lease("k", "new"))
    held = keeper(leases)
    assert await held.acquire("k", deadline=later) is None
    assert leases.replaced == ["", "old"]
    await held.close()
    assert leases.released == [Lease("k", "new")]


async def test_without_a_store_there_is_no_lease_and_no_hindrance() -> None:
    held = keeper(FakeLeases(StoreUnavailable("gone")))
    assert await held.acquire("k", deadline=later) is None
    assert held.held == 0


async def test_a_lease_is_renewed_while_there_is_progress() -> None:
    leases = FakeLeases(Lease("k", "t"))
    held = keeper(leases)
    await held.acquire("k", deadline=later)
    async with asyncio.timeout(5):
        while leases.renewed < 3:
            await asyncio.sleep(TERM)
    held.drop("k")
    await held.close()
    assert (held.held, leases.released) == (0, [Lease("k", "t")])


class Deadline:
    """An item's deadline, and how often a renewal asked for it."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.asked = seconds, 0

    def __call__(self) -> float:
        self.asked += 1
        return time.monotonic() + self.seconds


async def test_a_lease_is_not_renewed_after_two_terms_without_progress() -> None:
    leases, deadline = FakeLeases(Lease("k", "t")), Deadline(60.0)
    held = keeper(leases, progress_age=3 * TERM)
    await held.acquire("k", deadline=deadline)
    await until(lambda: deadline.asked == 3, "three turns of the renewal")
    assert leases.renewed == 0
    await held.close()


async def test_a_lease_is_not_renewed_past_its_items_deadline() -> None:
    leases, deadline = FakeLeases(Lease("k", "t")), Deadline(-1.0)
    held = keeper(leases)
    await held.acquire("k", deadline=deadline)
    await until(lambda: deadline.asked == 3, "three turns of the renewal")
    assert leases.renewed == 0
    await held.close()


class Flights:
    def __init__(self) -> None:
        jobs = Jobs()
        self.store, self.keeper, self.jobs, self.events = FakeStore(), jobs.keeper, jobs.table, jobs.events
        keeper: Any = self.keeper
        self.flight = SingleFlight(self.jobs, self.store, keeper, NAMESPACE)
        self._waiter = jobs.waiter

    def job(self, key: str, **changes: str) -> EncodeJob:
        return self._waiter(key, **changes).job


async def test_stored_items_are_answered_and_the_others_claimed() -> None:
    f = Flights()
    stored, fresh = f.job("stored"), f.job("fresh")
    f.store.stored = {"stored"}
    assert await f.flight.claim([stored, fresh]) == [fresh]
    end = f.events["stored"][-1]
    assert end.ready.already_stored
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
    assert end.failed.retryable
    assert (end.failed.owner_address, end.failed.owner_token) == ("other:1", "token")


@pytest.mark.parametrize("error", [None, StoreUnavailable("gone")])
async def test_items_are_claimed_when_the_store_does_not_answer(error, monkeypatch):
    monkeypatch.setattr(single_flight, "LOOK_UP_SECONDS", 0.01)
    f = Flights()
    f.store.error, f.store.delay = error, 0.0 if error else 60.0
    job = f.job("a")
    assert await f.flight.claim([job]) == [job]


async def test_an_item_that_came_by_the_store_is_looked_up_there_though_the_store_seems_away() -> None:
    f = Flights()
    job = f.job("stored")
    f.store.stored = {"stored"}
    f.jobs.reaches_store = lambda: False
    assert await f.flight.claim([job]) == []
    assert f.events["stored"][-1].HasField("ready")


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
