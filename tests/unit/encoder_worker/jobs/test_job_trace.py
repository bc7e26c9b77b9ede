"""Spans of encoder jobs: who owns the stages, who is linked, what a failure looks like."""

from __future__ import annotations

import time

import pytest

from support.fakes.encoder_jobs import Jobs, plan, ready, spec
from support.tracing.spans import KeptSpans, TickingClock, kept_tracer, new_context
from triptych.base.errors import InvalidRequest
from triptych.base.tracing.context import Producers, SpanContext, hex_trace_id, to_bytes
from triptych.base.tracing.tracer import SpanKind, Tracer
from triptych.encoder_worker.jobs.job import EncodeJob, StreamTrace, Waiter
from triptych.encoder_worker.jobs.table import JobStreams
from triptych.protos.job_events import failed

STAGES = ["preprocess", "wait for tower", "tower", "save"]


class Traced:
    """Streams whose proxies send trace contexts."""

    def __init__(self) -> None:
        self.jobs = Jobs()
        jobs = self.jobs
        self.streams = JobStreams(jobs.table, jobs.scheduler, None, jobs.job_metrics, jobs.changed)  # type: ignore[arg-type]
        self.tracer: Tracer
        self.kept: KeptSpans
        self.clock = TickingClock()
        self.tracer, self.kept = kept_tracer(clock=self.clock)
        self.producers = Producers()

    def join(self, parent: SpanContext | None, key: str = "a") -> Waiter:
        return self.streams.join(spec(key), lambda event: None, StreamTrace(self.tracer, parent))

    def encode(self, job: EncodeJob) -> None:
        """The item goes through all stages."""
        now = self.clock.now
        job.set_plan(plan(job.mm_hash))
        job.prepare_started, job.queued_since = now - 4.0, now - 3.0
        job.encoded_at, job.save_started = now - 1.0, now - 1.0
        spent = job.ready
        spent.preprocess_seconds = spent.queue_seconds = spent.save_seconds = 0.5
        spent.encode_seconds = spent.work_seconds = 0.25
        self.clock.now = now - 1.25
        if job.trace is not None:
            job.trace.encoding(job, self.producers)
        self.clock.now = now

    def end(self, job: EncodeJob, *, already_stored: bool = False) -> None:
        self.jobs.table.end(job, ready(job.mm_hash, already_stored=already_stored))


@pytest.fixture
async def t() -> Traced:
    return Traced()


async def test_a_jobs_stages_are_under_the_proxys_span_of_the_item(t: Traced) -> None:
    parent = new_context(sampled=True)
    waiter = t.join(parent)
    t.encode(waiter.job)
    t.end(waiter.job)
    job = t.kept.one("encoder job")
    assert (job.kind, job.parent, job.error, job.links) == (SpanKind.SERVER, parent, "", ())
    assert job.attributes["triptych.item.mm_hash"] == waiter.spec.mm_hash[:12]
    assert [span.name for span in t.kept.spans if span.parent == job.context] == STAGES
    tower = t.kept.one("tower")
    assert tower.end - tower.start == 0.25
    assert t.producers.links(waiter.spec.mm_hash) == (tower.context,)


async def test_a_stream_that_joins_is_linked_to_the_tower_of_the_first(t: Traced) -> None:
    first, second = new_context(sampled=True), new_context(sampled=True)
    one, _ = t.join(first), t.join(second)
    t.encode(one.job)
    t.end(one.job)
    mine, other = sorted(t.kept.all("encoder job"), key=lambda span: span.parent != first)
    assert (mine.parent, other.parent) == (first, second)
    assert (mine.attributes["triptych.item.shared"], other.attributes["triptych.item.shared"]) == (
        False,
        True,
    )
    assert other.links == (t.kept.one("tower").context,)
    assert [span.context.trace_id for span in t.kept.spans if span.name in STAGES] == [first.trace_id] * 4


async def test_the_first_recorded_stream_owns_the_stages(t: Traced) -> None:
    unrecorded, recorded = new_context(sampled=False), new_context(sampled=True)
    one = t.join(unrecorded)
    t.join(recorded)
    t.encode(one.job)
    t.end(one.job)
    assert {span.context.trace_id for span in t.kept.spans} == {recorded.trace_id}
    assert len(t.kept.spans) == 5


async def test_the_stages_are_recorded_though_their_owner_left(t: Traced) -> None:
    """Another stream's span is linked to them."""
    owner = t.join(new_context(sampled=True))
    other = t.join(new_context(sampled=True))
    t.encode(owner.job)
    t.streams.leave(owner)
    t.end(other.job)
    left, ended = t.kept.all("encoder job")
    assert (left.error, ended.error) == ("cancelled", "")
    assert ended.links == (t.kept.one("tower").context,)


async def test_a_failed_item_has_the_errors_code_and_the_stages_it_reached(t: Traced) -> None:
    waiter = t.join(new_context(sampled=True))
    waiter.job.prepare_started, waiter.job.ready.preprocess_seconds = time.monotonic(), 0.1
    error = InvalidRequest("image: not this one", param="image")
    t.jobs.table.end(waiter.job, failed(error, retryable=False))
    assert t.kept.one("encoder job").error == error.code
    assert t.kept.names().count("preprocess") == 1
    assert t.kept.all("tower") == []
    assert "not this one" not in repr(t.kept.spans)


async def test_a_stored_item_has_no_tower_and_no_link(t: Traced) -> None:
    waiter = t.join(new_context(sampled=True))
    t.end(waiter.job, already_stored=True)
    job = t.kept.one("encoder job")
    assert job.attributes["triptych.item.already_stored"] is True
    assert t.kept.names() == ["encoder job"]


async def test_a_streams_span_is_handed_in_once(t: Traced) -> None:
    waiter = t.join(new_context(sampled=True))
    t.encode(waiter.job)
    t.end(waiter.job)
    t.streams.leave(waiter)
    assert t.kept.names().count("encoder job") == 1


async def test_an_output_that_is_kept_keeps_its_producer(t: Traced) -> None:
    """A re-save of what an earlier job computed."""
    earlier = new_context(sampled=True)
    waiter = t.join(new_context(sampled=True))
    t.producers.note(waiter.spec.mm_hash, to_bytes(earlier))
    waiter.job.output = object()  # type: ignore[assignment]
    waiter.job.trace.encoding(waiter.job, t.producers)
    assert t.producers.links(waiter.spec.mm_hash) == (earlier,)


async def test_log_records_about_a_job_have_the_trace_that_its_stages_are_recorded_in(t: Traced) -> None:
    unrecorded = t.join(new_context(sampled=False))
    assert "trace_id" not in unrecorded.log_extra and "trace_id" not in unrecorded.job.log_extra
    parent = new_context(sampled=True)
    recorded = t.join(parent)
    assert recorded.log_extra["trace_id"] == recorded.job.log_extra["trace_id"] == hex_trace_id(parent)
    assert recorded.log_extra["request_id"] == recorded.spec.request_id
    recorded.job.set_plan(plan(recorded.job.mm_hash))
    assert recorded.job.tower_item().log_extra == recorded.job.log_extra
    # A stream without traces joins the same job, and says nothing of somebody else's trace.
    plain = t.streams.join(spec("a"), lambda event: None)
    assert "trace_id" not in plain.log_extra
