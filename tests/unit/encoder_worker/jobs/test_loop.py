"""The loop: look-ups, preprocessing, media asked for again, and one batch in the tower at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.fakes.encoder_jobs import (
    NAMESPACE,
    WIDTH,
    FakeEngine,
    FakePreparer,
    FakeStore,
    Jobs,
    output,
    plan,
    spec,
)
from support.waiting import until
from triptych.base.errors import InvalidRequest
from triptych.ec_connector.base import OutputCache
from triptych.encoder_worker.job_spec import ItemFormat
from triptych.encoder_worker.jobs import loop as module
from triptych.encoder_worker.jobs.job import Waiter
from triptych.encoder_worker.jobs.loop import JobLoop
from triptych.encoder_worker.jobs.single_flight import JobSaves, SingleFlight
from triptych.encoder_worker.jobs.table import JobStreams
from triptych.encoder_worker.media.budget import MediaBudget
from triptych.protos.encoder_pb2 import EncodeEvent
from triptych.protos.job_events import WAITS, planned


class Worker:
    """A running loop over a real scheduler and fakes of store, leases, preparer and engine."""

    def __init__(self, **options: Any) -> None:
        self.jobs = Jobs(**options)
        self.store, self.preparer, self.engine = FakeStore(), FakePreparer(), FakeEngine()
        self.outputs, self.budget = OutputCache(1 << 20), MediaBudget(1000)
        self.events: dict[str, list[EncodeEvent]] = {}
        jobs, preparer, engine, keeper = self.jobs, *_any(self.preparer, self.engine, self.jobs.keeper)
        self.streams = JobStreams(jobs.table, jobs.scheduler, preparer, jobs.job_metrics, jobs.changed)
        self.saves = JobSaves(jobs.table, engine, jobs.job_metrics)
        self.loop = JobLoop(
            jobs.table,
            jobs.scheduler,
            self.streams,
            SingleFlight(jobs.table, self.store, keeper, NAMESPACE),
            preparer,
            engine,
            self.outputs,
            self.saves,
            format=ItemFormat(NAMESPACE, "image", WIDTH, "float32"),
            metrics=jobs.job_metrics,
            changed=jobs.changed,
        )

    def join(self, key: str, **changes: object) -> Waiter:
        return self.streams.join(spec(key, **changes), self.events.setdefault(key, []).append)

    async def send(self, waiter: Waiter) -> None:
        room = await self.budget.acquire(4)
        await self.streams.media(waiter, [waiter.spec.mm_hash.encode()], room)

    async def turned(self) -> None:
        """The loop has looked at all that is there: it sees a bell after the changes before it."""
        self.jobs.changed.set()
        await until(lambda: not self.jobs.changed.is_set(), "a turn of the loop")

    def waiting(self) -> list[str]:
        """The items that no batch has taken into the tower."""
        return [job.mm_hash for job in self.jobs.scheduler.waiting()]

    async def planned(self, key: str) -> Waiter:
        """A stream whose item is preprocessed."""
        waiter = self.join(key)
        await self.send(waiter)
        await until(lambda: self.events[key], f"the plan of {key}")
        return waiter


def _any(*fakes: object) -> list[Any]:
    return list(fakes)


@pytest.fixture
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[Worker]:
    worker = Worker(**getattr(request, "param", {}))
    worker.loop.start()
    yield worker
    await worker.loop.stop()


async def test_an_item_is_preprocessed_and_its_media_room_released(worker: Worker) -> None:
    waiter = await worker.planned("a")
    assert worker.events["a"] == [planned(plan("a"))]
    assert worker.preparer.prepared == [b"a"]
    assert worker.budget.nbytes == 0
    assert waiter.job.ready.preprocess_seconds >= 0


async def test_a_kept_output_replaces_preprocessing_and_goes_to_the_engine(worker: Worker) -> None:
    worker.outputs["a"] = output("a")
    waiter = worker.join("a")
    await until(lambda: worker.events["a"], "the plan")
    worker.streams.permit(waiter)
    await until(lambda: worker.engine.batches, "a batch")
    assert worker.preparer.prepared == []
    assert worker.engine.batches[0][0] == ["a"]


@pytest.mark.parametrize(
    ("error", "param", "retryable"),
    [
        (InvalidRequest("image: damaged", param="image"), "image", False),
        (ZeroDivisionError("a bug"), "image", False),
    ],
)
async def test_an_item_that_cannot_be_preprocessed_fails_its_job_alone(worker, error, param, retryable):
    bad = worker.join("bad")
    await worker.send(bad)
    worker.preparer.error = error
    await until(lambda: worker.events["bad"], "the failure")
    [event] = worker.events["bad"]
    assert (event.failed.error.param, event.failed.retryable) == (param, retryable)
    assert "a bug" not in event.failed.error.message
    assert worker.budget.nbytes == 0
    worker.preparer.error = None
    await worker.planned("good")


async def test_an_item_whose_metadata_no_stored_value_can_have_is_refused_before_the_tower(worker):
    worker.preparer.layout = tuple(range(3000))
    waiter = worker.join("a")
    await worker.send(waiter)
    await until(lambda: worker.events["a"], "the failure")
    [event] = worker.events["a"]
    assert event.HasField("failed") and not event.failed.retryable
    assert event.failed.error.param == "image" and "too many runs" in event.failed.error.message
    assert worker.engine.batches == []


async def test_one_batch_is_in_the_tower_at_a_time(worker: Worker) -> None:
    first, second = await worker.planned("a"), await worker.planned("b")
    worker.streams.permit(first)
    await until(lambda: worker.engine.batches, "the first batch")
    worker.streams.permit(second)
    await worker.turned()
    assert worker.waiting() == ["b"]
    worker.engine.batches[0][1].set_result(None)
    await until(lambda: len(worker.engine.batches) == 2, "the second batch")
    assert worker.engine.batches[1][0] == ["b"]


@pytest.mark.parametrize("worker", [{"tower_credit": 1}], indirect=True)
async def test_streams_whose_items_wait_for_the_tower_get_a_keep_alive_after_a_batch(worker, monkeypatch):
    monkeypatch.setattr(module, "WAITS_SECONDS", 0.0)
    first, second = await worker.planned("a"), await worker.planned("b")
    worker.streams.permit(first)
    worker.streams.permit(second)
    await until(lambda: worker.engine.batches, "the first batch")
    worker.engine.batches[0][1].set_result(None)
    await until(lambda: WAITS in worker.events["b"], "the keep-alive")
    assert WAITS not in worker.events["a"]


async def test_the_tower_pauses_while_too_many_bytes_are_being_saved(worker, monkeypatch):
    monkeypatch.setattr(module, "SAVING_BYTES", 10)
    waiter = await worker.planned("a")
    worker.saves.nbytes = 11
    worker.streams.permit(waiter)
    await worker.turned()
    assert worker.waiting() == ["a"]
    worker.saves.nbytes = 10
    worker.jobs.changed.set()
    await until(lambda: worker.engine.batches, "the batch")


async def test_a_batch_that_cannot_begin_fails_its_items_and_frees_the_tower(worker: Worker) -> None:
    worker.engine.error = RuntimeError("the engine is gone")
    first = await worker.planned("a")
    worker.streams.permit(first)
    await until(lambda: len(worker.events["a"]) == 2, "the failure")
    assert worker.events["a"][-1].failed.retryable
    worker.engine.error = None
    worker.streams.permit(await worker.planned("b"))
    await until(lambda: worker.engine.batches, "the next batch")


async def test_an_error_of_one_decision_does_not_end_the_loop(worker, monkeypatch):
    gauges = worker.jobs.job_metrics.gauges
    fails = [True]

    def broken(counts: Any) -> None:
        if fails and fails.pop():
            raise RuntimeError("a bug")
        gauges(counts)

    monkeypatch.setattr(worker.jobs.job_metrics, "gauges", broken)
    worker.jobs.changed.set()
    await until(lambda: not fails, "the error")
    await worker.planned("a")


async def test_stop_cancels_running_work(worker: Worker) -> None:
    worker.store.delay = 60.0
    worker.join("a")
    await until(lambda: worker.store.asked, "the look-up")
    await asyncio.wait_for(worker.loop.stop(), 10)
