"""Spans of encoder jobs, made at their end from the moments that the job keeps anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.base.tracing import attributes as names
from triptych.base.tracing.context import SpanContext, hex_trace_id, to_bytes
from triptych.base.tracing.producers import Producers
from triptych.base.tracing.tracer import Span, SpanKind, Tracer

if TYPE_CHECKING:
    from triptych.encoder_worker.jobs.job import EncodeJob, Waiter


class StreamTrace:
    """The span of one proxy's stream, a child of that proxy's span of the item."""

    def __init__(self, tracer: Tracer, parent: SpanContext | None) -> None:
        self.tracer = tracer
        self._span = tracer.start("encoder job", parent, kind=SpanKind.SERVER)
        self.context = self._span.get_span_context()
        self.recording = self._span.is_recording()

    @property
    def trace_id(self) -> str:
        """For logs; empty where the trace is not recorded."""
        return hex_trace_id(self.context) if self.recording else ""

    def end(self, waiter: Waiter, outcome: str, *, already_stored: bool = False) -> None:
        """The stream has had its last event: `outcome` is "" or the error's code."""
        if not self.recording:
            return
        job, spec = waiter.job, waiter.spec
        owner = job.trace
        shared = owner is not None and owner.context != self.context
        if shared and owner is not None and owner.tower is not None and not already_stored:
            self._span.add_link(owner.tower.get_span_context())
        plan = job.plan
        sizes = {} if plan is None else {names.ROWS: plan.rows, names.BYTES: plan.nbytes}
        failed = {names.ERROR_TYPE: outcome} if outcome else {}
        self._span.set_attributes(
            {
                **names.item(spec.mm_hash),
                names.MODALITY: spec.modality,
                names.RE_ENCODE: spec.re_encode,
                names.SHARED: shared,
                names.STORED: already_stored,
                **sizes,
                **failed,
            }
        )
        self.tracer.end(self._span, error=outcome)


class JobTrace:
    """The stages of one item's job, under the first stream whose trace is recorded."""

    def __init__(self, owner: StreamTrace) -> None:
        self.context = owner.context
        self.trace_id = owner.trace_id
        #: The span of the item in the tower, which is the embedding's producer.
        self.tower: Span | None = None
        self._tracer = owner.tracer

    def encoding(self, job: EncodeJob, producers: Producers) -> None:
        """The item goes into the tower: what is saved now, this job has computed."""
        if job.output is None:
            self.tower = self._tracer.start("tower", self.context, names.item(job.mm_hash))
            producers.note(job.mm_hash, to_bytes(self.tower.get_span_context()))

    def end(self, job: EncodeJob) -> None:
        """The job has ended: hands in the stages that it went through."""
        times, tracer = job.timings, self._tracer
        tracer.stage("preprocess", self.context, job.prepare_started, times.preprocess)
        tracer.stage("wait for tower", self.context, job.queued_since, times.queue)
        if self.tower is not None and job.encoded_at and times.work > 0.0:
            tracer.end(self.tower, job.encoded_at)
        tracer.stage("save", self.context, job.save_started, times.save)
