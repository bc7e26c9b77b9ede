"""OTLP exporter: the one module that imports OpenTelemetry, and only once `--otlp-endpoint` is given."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind, TraceFlags, TraceState
from opentelemetry.trace import SpanContext as OtelContext
from opentelemetry.trace.status import Status, StatusCode

from triptych.tracing.context import SpanContext
from triptych.tracing.span import FinishedSpan

#: The longest reason of a failed export in a warning.
_REASON_CHARS = 200


class OtlpSender:
    """Sends spans to a collector over HTTP; the variables OTEL_EXPORTER_OTLP_* add headers and TLS."""

    def __init__(self, url: str, resource: dict[str, str], version: str) -> None:
        self._resource = Resource.create(dict(resource))
        self._scope = InstrumentationScope("triptych", version)
        self._exporter = OTLPSpanExporter(endpoint=url)
        self._last = _LastMessage()
        # It logs each failure and each try: what it says goes into our one warning a minute.
        for name in ("opentelemetry.exporter", "urllib3.connectionpool"):
            said = logging.getLogger(name)
            said.handlers[:], said.propagate = [self._last], False
            said.setLevel(logging.WARNING)

    def send(self, spans: Sequence[FinishedSpan]) -> str:
        """Exports a batch: "" or why it failed."""
        # Between two clocks: what time.time says now, less the seconds since.
        offset = time.time_ns() - time.monotonic_ns()
        readable = [self._readable(span, offset) for span in spans]
        self._last.text = ""
        if self._exporter.export(readable) is SpanExportResult.SUCCESS:
            return ""
        return self._last.text[:_REASON_CHARS] or "the collector did not take them"

    def stop(self) -> None:
        """Breaks off a send that is under way."""
        self._exporter.shutdown()

    def _readable(self, span: FinishedSpan, offset: int) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_otel(span.context),
            parent=None if span.parent is None else _otel(span.parent, remote=True),
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[Event(event.name, timestamp=_nanoseconds(event.at, offset)) for event in span.events],
            links=[Link(_otel(link, remote=True)) for link in span.links],
            kind=SpanKind[span.kind.value],
            instrumentation_scope=self._scope,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=_nanoseconds(span.start, offset),
            end_time=_nanoseconds(max(span.start, span.end), offset),
        )


class _LastMessage(logging.Handler):
    """Keeps the text of the last record."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def _otel(context: SpanContext, *, remote: bool = False) -> OtelContext:
    flags = TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([context.state]) if context.state else TraceState()
    return OtelContext(int(context.trace_id, 16), int(context.span_id, 16), remote, flags, state)


def _nanoseconds(moment: float, offset: int) -> int:
    return int(moment * 1e9) + offset
