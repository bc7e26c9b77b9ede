"""Before the tower: stored items are answered, items of other workers sent there, the rest claimed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from triptych.ec_connector.registry.leases import OwnedBy
from triptych.ec_connector.store.control import StoreUnavailable
from triptych.encoder_worker.job_spec import JobSpec
from triptych.encoder_worker.jobs import single_flight
from triptych.encoder_worker.jobs.job import EncodeJob, Failed, JobEvent, Ready, Waiter
from triptych.encoder_worker.jobs.metrics import JobMetrics
from triptych.encoder_worker.jobs.single_flight import SingleFlight
from triptych.encoder_worker.jobs.table import EncodeJobs, JobBounds
from triptych.encoder_worker.scheduler import EncoderScheduler
from triptych.metrics import EncoderMetrics
from triptych.types import ItemPlan

NAMESPACE = "ab" * 32


class FakeStore:
    """Has the items in `stored`; hangs or fails if a test wants."""

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.delay = 0.0
        self.error: Exception | None = None

    async def look_up(self, keys: Sequence[tuple[str, str]], /) -> list[ItemPlan | None]:
        await asyncio.sleep(self.delay)
        if self.error is not None:
            raise self.error
        return [plan(key) if key in self.stored else None for key, _ in keys]


class FakeKeeper:
    """Leases by mm_hash, of which some are another worker's."""

    def __init__(self) -> None:
        self.owners: dict[str, OwnedBy] = {}
        self.held: list[str] = []

    async def acquire(self, mm_hash: str, **_: object) -> OwnedBy | None:
        if (owner := self.owners.get(mm_hash)) is None:
            self.held.append(mm_hash)
        return owner

    def drop(self, mm_hash: str) -> None:
        if mm_hash in self.held:
            self.held.remove(mm_hash)


def plan(key: str) -> ItemPlan:
    return ItemPlan(key, NAMESPACE, "image", 1, 1, "float32", 1)


class Flights:
    def __init__(self) -> None:
        self.store, self.keeper = FakeStore(), FakeKeeper()
        keeper: Any = self.keeper
        metrics = JobMetrics(EncoderMetrics("tiny"), "tiny")
        scheduler = EncoderScheduler[EncodeJob](
            prepared_memory=100, batch_patches=10, preparations=1, tower_credit=1
        )
        self.jobs = EncodeJobs(JobBounds(100), scheduler, keeper, metrics, asyncio.Event())
        self.flight = SingleFlight(self.jobs, self.store, keeper, NAMESPACE)
        self.events: dict[str, list[JobEvent]] = {}

    def job(self, key: str, **changes: str) -> EncodeJob:
        spec = JobSpec("j", "r", key, NAMESPACE, "image", {}, "", 1, 9.0, **changes)  # type: ignore[arg-type]
        job = self.jobs.open(spec)
        send = self.events.setdefault(key, []).append
        job.waiters.append(Waiter(spec, job, time.monotonic() + 9, send))
        return job


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


async def test_an_item_of_another_worker_is_sent_there() -> None:
    f = Flights()
    f.keeper.owners = {"a": OwnedBy("other:1", "x", "token")}
    assert await f.flight.claim([f.job("a")]) == []
    end = f.events["a"][-1]
    assert isinstance(end, Failed) and end.retryable
    assert (end.owner_address, end.owner_token) == ("other:1", "token")


@pytest.mark.parametrize("error", [None, StoreUnavailable("gone")])
async def test_a_store_that_does_not_answer_holds_nothing_up(
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
