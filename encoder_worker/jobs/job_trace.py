"""Spans of encoder jobs, made at their end from the moments that the job keeps anyway."""

from __future__ import annotations

from typing import TYPE_CHECKING

from triptych.tracing import attributes as names
from triptych.tracing.context import SpanContext
from triptych.tracing.producers import Producers
from triptych.tracing.span import FinishedSpan, SpanKind
from triptych.tracing.tracer import Tracer

if TYPE_CHECKING:
    from triptych.encoder_worker.jobs.job import EncodeJob, Waiter


class StreamTrace:
    """The span of one proxy's stream, a child of that proxy's span of the item."""

    def __init__(self, tracer: Tracer, parent: SpanContext | None) -> None:
        self.tracer = tracer
        self.context = tracer.enter(parent)
        self._parent = parent
        self._start = tracer.clock()

    @property
    def trace_id(self) -> str:
        """For logs; empty where the trace is not recorded."""
        return self.context.trace_id if self.context.sampled else ""

    def end(self, waiter: Waiter, outcome: str, *, already_stored: bool = False) -> None:
        """The stream has had its last event: `outcome` is "" or the error's code."""
        if not self.context.sampled:
            return
        job, spec = waiter.job, waiter.spec
        owner = job.trace
        shared = owner is not None and owner.context != self.context
        links = (owner.tower,) if shared and owner is not None and not already_stored else ()
        plan = job.plan
        sizes = {} if plan is None else {names.ROWS: plan.rows, names.BYTES: plan.nbytes}
        failed = {names.ERROR_TYPE: outcome} if outcome else {}
        self.tracer.record(
            FinishedSpan(
                "encoder job",
                self.context,
                self._parent,
                self._start,
                self.tracer.clock(),
                {
                    **names.item(spec.mm_hash),
                    names.MODALITY: spec.modality,
                    names.RE_ENCODE: spec.re_encode,
                    names.SHARED: shared,
                    names.STORED: already_stored,
                    **sizes,
                    **failed,
                },
                SpanKind.SERVER,
                links,
                error=outcome,
            )
        )


class JobTrace:
    """The stages of one item's job, under the first stream whose trace is recorded."""

    def __init__(self, owner: StreamTrace) -> None:
        self.context = owner.context
        #: The tower's span, which is the embedding's producer.
        self.tower = owner.context.child()
        self._tracer = owner.tracer

    def encoding(self, job: EncodeJob, producers: Producers) -> None:
        """The item goes into the tower: what is saved now, this job has computed."""
        if job.output is None:
            producers.note(job.mm_hash, self.tower.to_bytes())

    def end(self, job: EncodeJob) -> None:
        """The job has ended: hands in the stages that it went through."""
        times, tracer = job.timings, self._tracer
        tracer.stage("preprocess", self.context, job.prepare_started, times.preprocess)
        tracer.stage("wait for tower", self.context, job.queued_since, times.queue)
        if job.encoded_at and times.work > 0.0:
            began = job.encoded_at - times.encode
            item = names.item(job.mm_hash)
            tracer.record(FinishedSpan("tower", self.tower, self.context, began, job.encoded_at, item))
        tracer.stage("save", self.context, job.save_started, times.save)
