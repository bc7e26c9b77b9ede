"""The encoder's jobs, and the saves that they end with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.fakes.encoder_jobs import FakeEngine, Jobs, output, plan, ready, spec
from triptych.base.errors import InternalError, InvalidRequest, Overloaded, Unavailable
from triptych.base.metrics import EncoderMetrics
from triptych.encoder_worker.engine import Encoded
from triptych.encoder_worker.jobs import single_flight as module
from triptych.encoder_worker.jobs.single_flight import JobSaves
from triptych.encoder_worker.jobs.table import JobBounds, JobMetrics
from triptych.encoder_worker.media.budget import MediaBudget
from triptych.encoder_worker.scheduler import SchedulerCounts, Stage
from triptych.protos.encoder_pb2 import EncodeEvent, ItemReady
from triptych.protos.job_events import failed, planned

SAVED = EncodeEvent(ready=ItemReady())
UNSAVED = failed(Unavailable("the store is full"), retryable=True)


@pytest.fixture
async def jobs() -> Jobs:
    return Jobs()


async def test_streams_of_one_item_share_its_job(jobs: Jobs) -> None:
    first = jobs.table.open(spec("a"))
    assert jobs.table.open(spec("a")) is first
    assert jobs.table.get("a") is first
    assert jobs.table.open_jobs() == [first]
    assert len(jobs.scheduler) == 1


async def test_one_re_encode_makes_the_whole_job_a_re_encode(jobs: Jobs) -> None:
    job = jobs.table.open(spec("a"))
    assert not job.re_encode
    jobs.table.open(spec("a", re_encode=True))
    jobs.table.open(spec("a"))
    assert job.re_encode


async def test_a_job_has_the_lowest_priority_of_its_streams(jobs: Jobs) -> None:
    job = jobs.table.open(spec("a", priority=4))
    assert job.priority == 4
    jobs.table.open(spec("a", priority=-1))
    jobs.table.open(spec("a", priority=9))
    assert job.priority == -1


async def test_unplanned_jobs_above_the_limit_are_refused_until_one_is_planned() -> None:
    jobs = Jobs(JobBounds(unplanned_jobs=1))
    job = jobs.table.open(spec("a"))
    with pytest.raises(Overloaded):
        jobs.table.open(spec("b"))
    jobs.scheduler.prepared(job, nbytes=1, cost=1)
    jobs.table.open(spec("b"))
    assert len(jobs.table) == 2


async def test_jobs_above_the_hard_limit_are_refused_even_when_all_are_planned() -> None:
    jobs = Jobs(JobBounds(unplanned_jobs=9, jobs=1))
    jobs.scheduler.prepared(jobs.table.open(spec("a")), nbytes=1, cost=1)
    with pytest.raises(Overloaded):
        jobs.table.open(spec("b"))


async def test_a_worker_without_the_store_fails_what_it_has_as_retryable_and_takes_nothing_new(jobs):
    jobs.waiter("a")
    jobs.table.reaches_store = lambda: False
    jobs.table.fail_all()
    assert [event.failed.retryable for event in jobs.events["a"] if event.HasField("failed")] == [True]
    assert len(jobs.table) == 0
    for again in (False, True):
        with pytest.raises(Unavailable, match="embedding store"):
            jobs.table.open(spec("a", re_encode=again))
    jobs.table.reaches_store = lambda: True
    jobs.table.open(spec("a"))


async def test_streams_of_one_job_above_the_limit_are_refused() -> None:
    jobs = Jobs(JobBounds(unplanned_jobs=9, waiters_per_job=1))
    jobs.waiter("a")
    with pytest.raises(Overloaded):
        jobs.table.open(spec("a"))


async def test_a_re_encode_is_accepted_above_all_limits() -> None:
    jobs = Jobs(JobBounds(unplanned_jobs=0, jobs=0, waiters_per_job=0))
    jobs.table.open(spec("a", re_encode=True))
    jobs.table.open(spec("a", re_encode=True))
    assert len(jobs.table) == 1


async def test_an_embedding_ends_every_stream_with_the_plan_before_it(jobs: Jobs) -> None:
    late: list[EncodeEvent] = []
    job = jobs.waiter("a").job
    job.set_plan(plan("a"))
    jobs.waiter("a", late)
    end = ready("a", already_stored=True)
    jobs.table.end(job, end)
    assert jobs.events["a"] == late == [planned(plan("a")), end]
    assert len(jobs.table) == len(jobs.scheduler) == 0
    found = jobs.metrics.registry.get_sample_value(
        "triptych_encoder_already_stored_total", {"model_name": "tiny"}
    )
    assert found == 1


async def test_a_job_ends_once(jobs: Jobs) -> None:
    job = jobs.waiter("a").job
    first = failed(InternalError("first"), retryable=True)
    jobs.table.end(job, first)
    jobs.table.end(job, failed(InternalError("second"), retryable=True))
    jobs.table.forget(job)
    assert jobs.events["a"] == [first]
    assert jobs.failures("internal_error") == 1


async def test_the_end_of_a_job_releases_its_lease_and_its_media() -> None:
    jobs, budget = Jobs(), MediaBudget(100)
    job = jobs.waiter("a").job
    await jobs.keeper.acquire("a")
    job.media_reservation = await budget.acquire(10)
    jobs.changed.clear()
    jobs.table.forget(job)
    assert jobs.keeper.held == []
    assert budget.nbytes == 0
    assert jobs.changed.is_set()


async def test_a_drain_fails_jobs_without_permission_at_once_and_waits_for_the_others(jobs: Jobs) -> None:
    jobs.waiter("a")
    permitted = jobs.waiter("b")
    permitted.permitted = True
    drain = asyncio.create_task(jobs.table.drain(30.0))
    await asyncio.sleep(0)
    [end] = jobs.events["a"]
    assert end.failed.retryable
    assert not jobs.events["b"] and not drain.done()
    with pytest.raises(Unavailable):
        jobs.table.open(spec("c"))
    jobs.table.end(permitted.job, ready("b"))
    await asyncio.wait_for(drain, 10)
    assert jobs.events["b"][-1] == ready("b")


async def test_a_drain_waits_for_the_item_in_the_tower(jobs: Jobs) -> None:
    job = jobs.waiter("a").job
    job.stage = Stage.ENCODING
    drain = asyncio.create_task(jobs.table.drain(30.0))
    await asyncio.sleep(0)
    assert jobs.table.open_jobs() == [job]
    jobs.table.forget(job)
    await asyncio.wait_for(drain, 10)


async def test_a_drain_has_all_of_its_grace(jobs: Jobs) -> None:
    jobs.waiter("a").permitted = True
    drain = asyncio.create_task(jobs.table.drain(30.0))
    # A deadline that has passed ends a wait within a few turns of the loop.
    for _ in range(20):
        await asyncio.sleep(0)
    assert not drain.done()
    assert not jobs.events["a"]
    drain.cancel()
    await asyncio.gather(drain, return_exceptions=True)


async def test_after_the_grace_the_remaining_jobs_fail_as_retryable(jobs: Jobs) -> None:
    jobs.waiter("a").permitted = True
    await jobs.table.drain(0.01)
    [end] = jobs.events["a"]
    assert end.failed.retryable
    assert len(jobs.table) == 0


class Saves:
    """A job `a` in the tower, with one stream, and the saves of its worker."""

    def __init__(self, **spec: object) -> None:
        self.jobs, self.engine = Jobs(), FakeEngine()
        engine: Any = self.engine
        self.saves = JobSaves(self.jobs.table, engine, self.jobs.job_metrics)
        self.job = self.jobs.waiter("a", **spec).job
        self.events = self.jobs.events["a"]
        self.job.set_plan(plan("a"))
        self.job.stage = Stage.ENCODING
        self.events.clear()

    def encoded(self, **changes: Any) -> None:
        fields = {"output": output("a"), "saving": True, **changes}
        self.saves.on_engine("a", Encoded(0.5, **fields))


async def test_a_saved_embedding_ends_the_job_with_the_times_of_its_phases() -> None:
    s = Saves()
    s.encoded()
    assert s.saves.nbytes == plan("a").nbytes
    assert not s.events
    s.saves.on_engine("a", SAVED)
    [event] = s.events
    assert event.HasField("ready") and not event.ready.already_stored
    assert event.ready.plan == planned(plan("a")).planned
    assert event.ready.encode_seconds == 0.5 and event.ready.save_seconds >= 0
    assert s.saves.nbytes == 0
    assert len(s.jobs.table) == 0


async def test_an_output_whose_save_has_begun_is_not_saved_again() -> None:
    s = Saves()
    s.encoded(saving=True)
    assert s.engine.saves == []


async def test_an_output_for_which_a_stream_has_come_meanwhile_is_saved() -> None:
    s = Saves(damaged_digest="d" * 40)
    s.encoded(saving=False)
    assert s.engine.saves == [("a", "d" * 40)]
    assert s.saves.nbytes == plan("a").nbytes


async def test_an_output_that_no_stream_waits_for_ends_its_job_without_a_save() -> None:
    s = Saves()
    s.job.waiters.clear()
    s.encoded(saving=False)
    assert s.engine.saves == []
    assert s.saves.nbytes == 0
    assert len(s.jobs.table) == 0


async def test_a_failed_save_is_repeated_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    s = Saves()
    s.encoded()
    for times in (1, 2):
        s.saves.on_engine("a", UNSAVED)
        await asyncio.sleep(0.01)
        assert len(s.engine.saves) == times
    assert s.job.save_error == "the store is full"
    s.saves.on_engine("a", SAVED)
    assert s.events[-1].HasField("ready")


async def test_a_failed_save_is_not_repeated_once_all_streams_have_left(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    s = Saves()
    s.encoded()
    s.job.waiters.clear()
    s.saves.on_engine("a", UNSAVED)
    await asyncio.sleep(0.01)
    assert s.engine.saves == []
    assert s.saves.nbytes == 0
    assert len(s.jobs.table) == 0


@pytest.mark.parametrize(
    ("error", "retryable", "code"),
    [
        (InvalidRequest("image: its values overflow", param="image"), False, "invalid_request_error"),
        (RuntimeError("out of memory"), True, "internal_error"),
        (None, True, "internal_error"),
    ],
)
async def test_a_failure_of_the_tower_is_retryable_unless_the_item_is_at_fault(error, retryable, code):
    s = Saves()
    s.encoded(output=None, error=error)
    [event] = s.events
    assert event.HasField("failed") and event.failed.retryable is retryable
    assert event.failed.error.code == code
    assert s.saves.nbytes == 0


async def test_a_job_that_is_answered_ends_with_its_save_also_when_the_store_is_lost() -> None:
    s = Saves()
    s.encoded()
    s.job.waiters.clear()
    s.jobs.table.fail_all()
    assert s.jobs.table.get("a") is s.job
    s.saves.on_engine("a", SAVED)
    assert s.saves.nbytes == len(s.jobs.table) == 0


@pytest.mark.parametrize("ends", [[SAVED], [UNSAVED, SAVED]])
async def test_a_job_that_follows_one_failed_in_its_save_has_the_saves_end(ends, monkeypatch):
    """No byte stays counted: above 256 MiB the tower would not run again."""
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    s = Saves()
    s.encoded()
    s.jobs.table.fail_all()
    later: list[EncodeEvent] = []
    job = s.jobs.waiter("a", later).job
    job.set_plan(plan("a"))
    job.stage = Stage.ENCODING
    s.encoded()
    assert s.saves.nbytes == plan("a").nbytes
    for end in ends:
        s.saves.on_engine("a", end)
        await asyncio.sleep(0.01)
    assert later[-1].HasField("ready")
    assert s.saves.nbytes == len(s.jobs.table) == 0
    assert len(s.engine.saves) == len(ends) - 1


async def test_a_save_that_was_to_be_repeated_leaves_the_next_jobs_alone(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    s = Saves()
    s.encoded()
    s.saves.on_engine("a", UNSAVED)  # to be saved again in a moment
    s.jobs.table.fail_all()
    job = s.jobs.waiter("a").job
    job.set_plan(plan("a"))
    job.stage = Stage.ENCODING
    s.encoded()
    await asyncio.sleep(0.01)
    assert s.engine.saves == []
    assert s.saves.nbytes == plan("a").nbytes
    s.saves.on_engine("a", SAVED)
    assert s.saves.nbytes == len(s.jobs.table) == 0


async def test_reports_for_items_without_a_job_are_ignored() -> None:
    s = Saves()
    for event in (Encoded(0.1, output=output("b"), saving=True), SAVED, UNSAVED):
        s.saves.on_engine("b", event)
    assert s.saves.nbytes == 0
    assert not s.events


def test_each_gauge_shows_the_schedulers_count_of_its_name() -> None:
    metrics = EncoderMetrics("tiny")
    JobMetrics(metrics, "tiny").gauges(SchedulerCounts(5, planned=4, queued=3, encoding=2, prepared_bytes=1))
    names = ("jobs", "planned_items", "queue_items", "inflight", "prepared_bytes")
    labels = {"model_name": "tiny"}
    shown = [metrics.registry.get_sample_value(f"triptych_encoder_{name}", labels) for name in names]
    assert shown == [5, 4, 3, 2, 1]
