"""Trace of one attempt at a PD worker: its span and those of its items and stages."""

from __future__ import annotations

from dataclasses import dataclass

from triptych.base.tracing import attributes as names
from triptych.base.tracing.context import Producers, hex_trace_id, parse_traceparent
from triptych.base.tracing.tracer import Span, SpanKind, Tracer
from triptych.protos import pd_pb2


@dataclass(frozen=True, slots=True)
class PDTraces:
    """What a PD worker's traces need: the tracer, and the spans that computed the items it has loaded."""

    tracer: Tracer
    producers: Producers

    def begin(self, message: pd_pb2.SubmitRequest) -> AttemptTrace | None:
        """The trace of an attempt that has come; None where it is not recorded."""
        parent = parse_traceparent(message.traceparent, message.tracestate)
        start = self.tracer.clock()
        span = self.tracer.start("PD request", parent, kind=SpanKind.SERVER, at=start)
        return AttemptTrace(self, span, start, message) if span.is_recording() else None


class AttemptTrace:
    """The span of one attempt, from Submit to its last event. It has one call for each event but tokens."""

    def __init__(self, traces: PDTraces, span: Span, start: float, message: pd_pb2.SubmitRequest) -> None:
        self.context = span.get_span_context()
        #: For logs.
        self.trace_id = hex_trace_id(self.context)
        self._traces = traces
        self._span = span
        self._start = start
        self._admitted: float | None = None
        span.set_attributes(
            {
                names.REQUEST_ID: message.request_id,
                names.ATTEMPT: message.attempt,
                names.ITEMS: len(message.items),
                names.RESUMED_TOKENS: len(message.resume.output_token_ids),
            }
        )

    def admitted(self) -> None:
        """The bytes of all items are reserved."""
        self._admitted = self._traces.tracer.clock()
        self._traces.tracer.note(self._span, "admitted", self._admitted)

    def item_loaded(self, event: pd_pb2.ItemLoaded) -> None:
        """An item is there, whether it was loaded for this request or not."""
        tracer, at = self._traces.tracer, self._traces.tracer.clock()
        # A load that another request had begun is this one's from its arrival on.
        start = max(self._start, at - event.seconds)
        source = event.path or ("store" if event.seconds > 0.0 else "resident")
        attributes = {**names.item(event.mm_hash), names.SOURCE: source}
        # Linked to the span that computed the embedding, be it another request's.
        links = self._traces.producers.links(event.mm_hash)
        tracer.end(tracer.start("load item", self.context, attributes, at=start, links=links), at)

    def item_missing(self, event: pd_pb2.ItemMissing) -> None:
        """An item is gone from the store, or damaged."""
        name = "item damaged" if event.damaged_digest else "item missing"
        self._traces.tracer.note(self._span, name)

    def finished(self, end: pd_pb2.Finished) -> None:
        """The attempt's last event."""
        self._span.set_attributes(
            {
                names.INPUT_TOKENS: end.prompt_tokens,
                names.CACHED_TOKENS: end.cached_tokens,
                names.OUTPUT_TOKENS: end.completion_tokens,
                names.FINISH_REASONS: (end.reason,),
            }
        )
        self._stages(end)
        self._record(end.error.code)

    def failed(self, error: str) -> None:
        """The attempt ended without a last event of the engine: cancelled, refused, or handed over."""
        self._record(error)

    def _stages(self, end: pd_pb2.Finished) -> None:
        tracer, context, start = self._traces.tracer, self.context, self._start
        tracer.stage("queue", context, start, end.queue_seconds)
        if self._admitted is not None:
            tracer.stage("wait for items", context, self._admitted, end.load_seconds)
        scheduled = start + end.queue_seconds
        tracer.stage("prefill", context, scheduled, end.prefill_seconds)
        tracer.stage("decode", context, scheduled + end.prefill_seconds, end.decode_seconds)

    def _record(self, error: str) -> None:
        if error:
            self._span.set_attribute(names.ERROR_TYPE, error)
        self._traces.tracer.end(self._span, error=error)
