"""Streams of proxies: join, media, permission, half-close and leaving."""

from __future__ import annotations

import time
from typing import Any

import pytest

from support.fakes.encoder_jobs import FakePreparer, Jobs, plan, spec
from triptych.base.errors import InvalidRequest
from triptych.encoder_worker.jobs.job import Waiter
from triptych.encoder_worker.jobs.table import JobStreams
from triptych.encoder_worker.media.budget import MediaBudget
from triptych.encoder_worker.scheduler import Stage
from triptych.protos.encoder_pb2 import EncodeEvent
from triptych.protos.job_events import NEED_MEDIA, planned


class Streams:
    def __init__(self) -> None:
        self.jobs, self.preparer, self.budget = Jobs(), FakePreparer(), MediaBudget(1000)
        preparer: Any = self.preparer
        jobs = self.jobs
        self.streams = JobStreams(jobs.table, jobs.scheduler, preparer, jobs.job_metrics, jobs.changed)

    def join(self, events: list[EncodeEvent] | None = None, key: str = "a") -> Waiter:
        return self.streams.join(spec(key), (events if events is not None else []).append)

    async def send(self, waiter: Waiter) -> None:
        room = await self.budget.acquire(4)
        await self.streams.media(waiter, [b"me", b"dia"], room)

    def planned(self, waiter: Waiter) -> None:
        """The item is preprocessed."""
        waiter.job.set_plan(plan(waiter.spec.mm_hash))
        self.jobs.scheduler.prepared(waiter.job, nbytes=10, cost=1)


@pytest.fixture
async def s() -> Streams:
    return Streams()


async def test_a_stream_that_joins_a_planned_job_gets_the_plan_at_once(s: Streams) -> None:
    s.planned(s.join())
    events: list[EncodeEvent] = []
    s.join(events)
    assert events == [planned(plan("a"))]
    assert s.jobs.changed.is_set()


async def test_verified_media_wait_for_preprocessing_keep_their_room_and_wake_the_loop(s: Streams) -> None:
    waiter = s.join()
    s.jobs.changed.clear()
    await s.send(waiter)
    assert waiter.job.media is not None and waiter.job.media.data == b"media"
    assert waiter.job.stage is Stage.MEDIA
    assert s.budget.nbytes == 4
    assert s.jobs.changed.is_set()


async def test_media_of_a_second_stream_are_dropped_with_their_room(s: Streams) -> None:
    first, second = s.join(), s.join()
    await s.send(first)
    await s.send(second)
    assert s.budget.nbytes == 4


async def test_media_of_a_stream_that_has_ended_are_dropped_unverified(s: Streams) -> None:
    waiter = s.join()
    s.join()
    s.streams.leave(waiter)
    s.preparer.error = AssertionError("nothing is verified")
    await s.send(waiter)
    assert s.budget.nbytes == 0
    assert waiter.job.media is None


async def test_media_that_are_not_of_the_hash_give_their_room_back(s: Streams) -> None:
    waiter = s.join()
    s.preparer.error = InvalidRequest("mm_hash: another one", param="mm_hash")
    with pytest.raises(InvalidRequest):
        await s.send(waiter)
    assert s.budget.nbytes == 0
    assert waiter.job.stage is Stage.NO_MEDIA


async def test_permission_lets_a_planned_item_into_the_tower(s: Streams) -> None:
    waiter = s.join()
    s.planned(waiter)
    assert s.jobs.scheduler.next_batch() == []
    s.streams.permit(waiter)
    assert waiter.job.queued_since > 0
    assert s.jobs.scheduler.next_batch() == [waiter.job]


async def test_permission_of_a_stream_that_has_ended_counts_for_nothing(s: Streams) -> None:
    waiter, other = s.join(), s.join()
    s.planned(other)
    s.streams.leave(waiter)
    s.streams.permit(waiter)
    assert s.jobs.scheduler.next_batch() == []


async def test_the_last_stream_that_leaves_ends_the_job(s: Streams) -> None:
    first, second = s.join(), s.join()
    s.streams.leave(first)
    assert len(s.jobs.table) == 1
    s.streams.leave(second)
    s.streams.leave(second)
    assert len(s.jobs.table) == 0


async def test_permission_leaves_with_its_stream(s: Streams) -> None:
    permitted, other = s.join(), s.join()
    s.planned(other)
    s.streams.permit(permitted)
    s.streams.leave(permitted)
    assert other.job.queued_since == 0.0
    assert s.jobs.scheduler.next_batch() == []


async def test_permission_stays_while_another_stream_gives_it_too(s: Streams) -> None:
    first, second = s.join(), s.join()
    s.planned(first)
    s.streams.permit(first)
    s.streams.permit(second)
    s.streams.leave(first)
    assert s.jobs.scheduler.next_batch() == [second.job]


async def test_an_item_in_the_tower_keeps_its_job_without_streams(s: Streams) -> None:
    waiter = s.join()
    s.planned(waiter)
    s.streams.permit(waiter)
    assert s.jobs.scheduler.next_batch() == [waiter.job]
    s.streams.leave(waiter)
    assert s.jobs.table.open_jobs() == [waiter.job]


async def test_media_are_asked_for_again_from_a_stream_with_permission(s: Streams) -> None:
    s.join()
    events: list[EncodeEvent] = []
    permitted = s.join(events)
    s.streams.permit(permitted)
    s.streams.request_media(permitted.job)
    assert events == [NEED_MEDIA]
    assert permitted.job.media_sender is permitted


async def test_when_the_sender_of_media_leaves_another_stream_may_be_asked(s: Streams) -> None:
    sender, other = s.join(), s.join()
    s.planned(sender)
    sender.job.drop_pixels()
    for waiter in (sender, other):
        s.streams.permit(waiter)
    assert s.jobs.scheduler.next_media_request() is sender.job
    s.streams.request_media(sender.job)
    assert s.jobs.scheduler.next_media_request() is None
    s.streams.leave(sender)
    assert sender.job.media_sender is None
    assert s.jobs.scheduler.next_media_request() is sender.job


@pytest.mark.parametrize(
    ("complete", "media_needed", "permitted", "param", "retryable"),
    [
        (False, False, True, "media_bytes", False),
        (False, True, True, "media_bytes", True),
        (True, True, True, None, True),
        (True, False, False, "run", False),
    ],
)
async def test_a_half_close_too_early_fails_the_stream(
    s: Streams, complete: bool, media_needed: bool, permitted: bool, param: str | None, retryable: bool
) -> None:
    events: list[EncodeEvent] = []
    waiter = s.join(events)
    waiter.permitted, waiter.media_needed = permitted, media_needed
    s.streams.close(waiter, complete=complete)
    [failed] = events
    assert (failed.failed.error.param or None, failed.failed.retryable) == (param, retryable)
    assert len(s.jobs.table) == 0
    assert s.jobs.failures(failed.failed.error.code) == 1


async def test_a_half_close_with_media_and_permission_goes_on_waiting(s: Streams) -> None:
    events: list[EncodeEvent] = []
    waiter = s.join(events)
    s.streams.permit(waiter)
    s.streams.close(waiter, complete=True)
    assert not events and not waiter.ended


async def test_media_that_a_half_closed_stream_would_have_to_send_again_fail_it(s: Streams) -> None:
    events: list[EncodeEvent] = []
    waiter = s.join(events)
    s.streams.permit(waiter)
    s.streams.close(waiter, complete=True)
    s.streams.request_media(waiter.job)
    wanted, failed = events
    assert wanted == NEED_MEDIA
    assert failed.failed.retryable


async def test_a_failed_stream_leaves_its_job_to_the_others(s: Streams) -> None:
    events: list[EncodeEvent] = []
    waiter, other = s.join(events), s.join()
    s.streams.fail(waiter, InvalidRequest("bad", param="media"), retryable=False)
    s.streams.fail(waiter, InvalidRequest("bad", param="media"), retryable=False)
    assert len(events) == 1
    assert other.job.waiters == [other] and not other.ended


@pytest.mark.parametrize(("save_error", "code"), [("", "deadline_exceeded"), ("full", "unavailable")])
async def test_a_late_stream_gets_the_store_as_the_reason_if_saves_have_failed(s, save_error, code):
    events: list[EncodeEvent] = []
    waiter = s.join(events)
    waiter.job.save_error = save_error
    assert waiter.deadline > time.monotonic()
    s.streams.fail_late(waiter)
    [failed] = events
    assert failed.failed.error.code == code
