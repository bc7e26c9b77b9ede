"""Saves: outputs of the tower are saved, retried while a stream waits, and end their jobs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.fakes.encoder_jobs import FakeEngine, Jobs, output, plan
from triptych.base.errors import InvalidRequest, RequestError
from triptych.encoder_worker.engine import Encoded, Saved, Unsaved
from triptych.encoder_worker.jobs import single_flight as module
from triptych.encoder_worker.jobs.job import Failed, JobEvent, Ready
from triptych.encoder_worker.jobs.single_flight import JobSaves
from triptych.encoder_worker.scheduler import Stage


class Saves:
    """A job `a` in the tower, with one stream, and the saves of its worker."""

    def __init__(self, **spec: object) -> None:
        self.jobs, self.engine = Jobs(), FakeEngine()
        engine: Any = self.engine
        self.saves = JobSaves(self.jobs.table, engine, self.jobs.job_metrics)
        self.events: list[JobEvent] = []
        self.waiter = self.jobs.waiter("a", self.events, **spec)
        self.job = self.waiter.job
        self.job.set_plan(plan("a"))
        self.job.stage = Stage.ENCODING
        self.events.clear()

    def encoded(self, **changes: Any) -> None:
        fields = {"output": output("a"), "saving": True, **changes}
        self.saves.on_engine(Encoded("a", 0.5, **fields))


async def test_a_saved_embedding_ends_the_job_with_the_times_of_its_phases() -> None:
    s = Saves()
    s.encoded()
    assert s.saves.nbytes == plan("a").nbytes
    assert not s.events
    s.saves.on_engine(Saved("a"))
    [ready] = s.events
    assert isinstance(ready, Ready) and not ready.already_stored
    assert ready.timings.encode == 0.5 and ready.timings.save >= 0
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
        s.saves.on_engine(Unsaved("a", "the store is full"))
        await asyncio.sleep(0.01)
        assert len(s.engine.saves) == times
    assert s.job.save_error == "the store is full"
    s.saves.on_engine(Saved("a"))
    assert isinstance(s.events[-1], Ready)


async def test_a_failed_save_is_not_repeated_once_all_streams_have_left(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    s = Saves()
    s.encoded()
    s.job.waiters.clear()
    s.saves.on_engine(Unsaved("a", "the store is full"))
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
    [failed] = s.events
    assert isinstance(failed, Failed) and failed.retryable is retryable
    assert isinstance(failed.error, RequestError) and failed.error.code == code
    assert s.saves.nbytes == 0


async def test_reports_for_items_without_a_job_are_ignored() -> None:
    s = Saves()
    for event in (Encoded("b", 0.1, output=output("b"), saving=True), Saved("b"), Unsaved("b", "late")):
        s.saves.on_engine(event)
    assert s.saves.nbytes == 0
    assert not s.events
