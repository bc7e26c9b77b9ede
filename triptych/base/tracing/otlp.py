"""Sampling of spans and their export by OTLP: the module that imports OpenTelemetry's SDK, once it is needed.

Neither a slow nor an absent collector is felt: the SDK's processor has a bounded queue, which its thread
empties in batches.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes

from triptych.base.tracing.tracer import Tracer

logger = logging.getLogger(__name__)

#: Spans that wait at most; the oldest are dropped for new ones. Each takes some kilobytes.
MAX_SPANS = 8192
BATCH_SPANS = 512
#: Longest wait of a span for others of its batch.
BATCH_SECONDS = 1.0
#: Time in which what is left is sent at the process's end.
CLOSING_SECONDS = 3.0
#: Least time between two warnings.
WARN_SECONDS = 60.0
#: The longest reason of a failed export in a warning.
_REASON_CHARS = 200


def otlp_tracer(url: str, resource: dict[str, str], version: str, sampler: Sampler) -> Tracer:
    """A tracer that sends to a collector over HTTP; OTEL_EXPORTER_OTLP_* add headers and TLS."""
    spans = SpanQueue(WarningExporter(OTLPSpanExporter(endpoint=url)))
    provider = TracerProvider(sampler, Resource.create(dict(resource)), shutdown_on_exit=False)
    provider.add_span_processor(spans)
    return Tracer(provider.get_tracer("triptych", version), spans.close)


class SpanQueue(BatchSpanProcessor):
    """The SDK's queue, whose `exporter` knows how many of its spans have been dropped."""

    def __init__(self, exporter: WarningExporter) -> None:
        super().__init__(exporter, MAX_SPANS, BATCH_SECONDS * 1000, BATCH_SPANS)
        self._exporter = exporter

    def on_end(self, span: ReadableSpan) -> None:
        self._exporter.expect()
        super().on_end(span)

    def close(self) -> None:
        """Sends what is left, and waits for it for a few seconds at most. Idempotent."""
        # The SDK would wait for half a minute.
        ending = threading.Thread(target=self.shutdown, name="traces", daemon=True)
        ending.start()
        ending.join(CLOSING_SECONDS)
        self._exporter.shutdown()  # a send that still waits for the collector ends
        ending.join(0.5)


class WarningExporter(SpanExporter):
    """An exporter by `inner` whose losses are one warning a minute.

    OpenTelemetry logs each failure and each try: what it says goes into that warning.
    """

    def __init__(self, inner: SpanExporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._clock = clock
        self._waiting = self._lost = 0
        self._warned_at = -WARN_SECONDS
        self._closed = False
        self._last = _LastMessage()
        for name in ("opentelemetry.exporter", "opentelemetry.sdk", "urllib3.connectionpool"):
            said = logging.getLogger(name)
            said.handlers[:], said.propagate = [self._last], False
            said.setLevel(logging.WARNING)

    def expect(self) -> None:
        """A span goes into the queue; into a full one in another's place."""
        if self._waiting < MAX_SPANS:
            self._waiting += 1
        else:
            self._lost += 1

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._waiting -= len(spans)
        self._last.text = ""
        result, why = SpanExportResult.FAILURE, "the collector did not take them"
        try:
            result = self._inner.export(spans)
        except Exception as error:
            why = f"unexpected: {error!r}"
        if result is SpanExportResult.SUCCESS:
            why = "more spans come than the collector takes"
        else:
            self._lost += len(spans)
            why = self._last.text[:_REASON_CHARS] or why
        self._warn(why)
        return result

    def _warn(self, why: str) -> None:
        """Once a minute at most, with the number of spans lost since."""
        if self._lost and self._clock() - self._warned_at >= WARN_SECONDS:
            self._warned_at, lost, self._lost = self._clock(), self._lost, 0
            remedy = "see to the collector of --otlp-endpoint"
            logger.warning("%d spans of traces are lost (%s): %s", lost, why, remedy)

    def shutdown(self) -> None:
        """Breaks off an export that is under way."""
        if not self._closed:
            self._closed = True
            self._inner.shutdown()


class _LastMessage(logging.Handler):
    """Keeps the text of the last record."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


class DrawingSampler(Sampler):
    """A sampler that takes `ratio` of all requests by `draw`: clients choose their trace ids."""

    def __init__(self, ratio: float, draw: Callable[[], float] = random.random) -> None:
        self._ratio = ratio
        self._draw = draw

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        state = get_current_span(parent_context).get_span_context().trace_state
        if self._draw() < self._ratio:
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, state)
        return SamplingResult(Decision.DROP, None, state)

    def get_description(self) -> str:
        return f"DrawingSampler{{{self._ratio:g}}}"


def request_sampler(
    ratio: float, *, trusts_parent: bool = True, draw: Callable[[], float] = random.random
) -> Sampler:
    """The sampler of a service. `ratio` is the part of the requests without a parent that are recorded.

    With `trusts_parent` the caller's sampled flag decides, as among services that belong together. Without,
    as for clients that are told apart by API keys, it does not: a client could have each of its requests
    recorded. A ratio of 0 records nothing, whatever a caller says.
    """
    drawn = DrawingSampler(ratio, draw)
    if trusts_parent and ratio > 0.0:
        return ParentBased(drawn)
    return ParentBased(drawn, remote_parent_sampled=drawn, remote_parent_not_sampled=drawn)
