"""The job table: one job per item, limits on jobs and streams, ends, and drain."""

from __future__ import annotations

import asyncio

import pytest

from support.fakes.encoder_jobs import Jobs, plan, spec
from triptych.base.errors import InternalError, Overloaded, Unavailable
from triptych.encoder_worker.jobs.job import Failed, JobEvent, JobTimings, Planned, Ready
from triptych.encoder_worker.jobs.table import JobBounds
from triptych.encoder_worker.media.preparer import MediaBudget
from triptych.encoder_worker.scheduler import Stage


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
    events: list[JobEvent] = []
    jobs.waiter("a", events)
    jobs.table.reaches_store = lambda: False
    jobs.table.fail_all()
    assert [(type(event), event.retryable) for event in events if isinstance(event, Failed)] == [
        (Failed, True)
    ]
    assert len(jobs.table) == 0
    for again in (False, True):
        with pytest.raises(Unavailable, match="embedding store"):
            jobs.table.open(spec("a", re_encode=again))
    jobs.table.reaches_store = lambda: True
    jobs.table.open(spec("a"))


async def test_streams_of_one_job_above_the_limit_are_refused() -> None:
    jobs = Jobs(JobBounds(unplanned_jobs=9, waiters_per_job=1))
    jobs.waiter("a", [])
    with pytest.raises(Overloaded):
        jobs.table.open(spec("a"))


async def test_a_re_encode_is_accepted_above_all_limits() -> None:
    jobs = Jobs(JobBounds(unplanned_jobs=0, jobs=0, waiters_per_job=0))
    jobs.table.open(spec("a", re_encode=True))
    jobs.table.open(spec("a", re_encode=True))
    assert len(jobs.table) == 1


async def test_an_embedding_ends_every_stream_with_the_plan_before_it(jobs: Jobs) -> None:
    early: list[JobEvent] = []
    late: list[JobEvent] = []
    job = jobs.waiter("a", early).job
    job.set_plan(plan("a"))
    jobs.waiter("a", late)
    ready = Ready(plan("a"), True, JobTimings())
    jobs.table.end(job, ready)
    assert early == late == [Planned(plan("a")), ready]
    assert len(jobs.table) == len(jobs.scheduler) == 0
    found = jobs.metrics.registry.get_sample_value(
        "triptych_encoder_already_stored_total", {"model_name": "tiny"}
    )
    assert found == 1


async def test_a_job_ends_once(jobs: Jobs) -> None:
    events: list[JobEvent] = []
    job = jobs.waiter("a", events).job
    failed = Failed(InternalError("first"), retryable=True)
    jobs.table.end(job, failed)
    jobs.table.end(job, Failed(InternalError("second"), retryable=True))
    jobs.table.forget(job)
    assert events == [failed]
    assert jobs.failures("internal_error") == 1


async def test_the_end_of_a_job_releases_its_lease_and_its_media() -> None:
    jobs, budget = Jobs(), MediaBudget(100)
    job = jobs.waiter("a", []).job
    await jobs.keeper.acquire("a")
    job.media_room = await budget.acquire(10)
    jobs.changed.clear()
    jobs.table.forget(job)
    assert jobs.keeper.held == []
    assert budget.nbytes == 0
    assert jobs.changed.is_set()


async def test_a_drain_fails_jobs_without_permission_at_once_and_waits_for_the_others(jobs: Jobs) -> None:
    waiting: list[JobEvent] = []
    running: list[JobEvent] = []
    jobs.waiter("a", waiting)
    permitted = jobs.waiter("b", running)
    permitted.permitted = True
    drain = asyncio.create_task(jobs.table.drain(30.0))
    await asyncio.sleep(0)
    [failed] = waiting
    assert isinstance(failed, Failed) and failed.retryable
    assert not running and not drain.done()
    with pytest.raises(Unavailable):
        jobs.table.open(spec("c"))
    jobs.table.end(permitted.job, Ready(plan("b"), False, JobTimings()))
    await asyncio.wait_for(drain, 10)
    assert isinstance(running[-1], Ready)


async def test_a_drain_waits_for_the_item_in_the_tower(jobs: Jobs) -> None:
    job = jobs.waiter("a", []).job
    job.stage = Stage.ENCODING
    drain = asyncio.create_task(jobs.table.drain(30.0))
    await asyncio.sleep(0)
    assert jobs.table.open_jobs() == [job]
    jobs.table.forget(job)
    await asyncio.wait_for(drain, 10)


async def test_after_the_grace_the_remaining_jobs_fail_as_retryable(jobs: Jobs) -> None:
    events: list[JobEvent] = []
    jobs.waiter("a", events).permitted = True
    await jobs.table.drain(0.01)
    [failed] = events
    assert isinstance(failed, Failed) and failed.retryable
    assert len(jobs.table) == 0
