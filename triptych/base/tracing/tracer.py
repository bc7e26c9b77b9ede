"""Tracer: the entry point for a service's spans. A service without traces has none, and does nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode

from triptych.base.tracing.attributes import Attributes
from triptych.base.tracing.context import SpanContext, carrying

__all__ = ["Span", "SpanKind"]


def clock_offset() -> int:
    """Nanoseconds between two clocks: what `time.time` says now, less `time.monotonic`."""
    return time.time_ns() - time.monotonic_ns()


class Tracer:
    """OpenTelemetry's tracer for spans whose moments are seconds of `clock`, `offset` before its own."""

    def __init__(
        self,
        spans: trace.Tracer,
        close: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        offset: Callable[[], int] = clock_offset,
    ) -> None:
        self._spans = spans
        self._close = close
        self._offset = offset
        self.clock = clock

    def start(
        self,
        name: str,
        parent: SpanContext | None,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        at: float | None = None,
        links: tuple[SpanContext, ...] = (),
    ) -> Span:
        """A span that begins `at` a moment, or now. One that is not recorded has a context and no more.

        Whether it is recorded is its parent's decision, and the sampler's where the parent, or none, is
        another process's. The caller's trace goes on in any case.
        """
        given = [Link(link) for link in links]
        return self._spans.start_span(name, carrying(parent), kind, attributes, given, self._nanoseconds(at))

    def note(self, span: Span, event: str, at: float | None = None) -> None:
        """A moment within the span."""
        span.add_event(event, timestamp=self._nanoseconds(at))

    def end(self, span: Span, at: float | None = None, error: str = "") -> None:
        """The span ends `at` a moment, or now; `error` names what went wrong."""
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self._nanoseconds(at))

    def stage(
        self,
        name: str,
        parent: SpanContext,
        start: float,
        seconds: float,
        attributes: Attributes | None = None,
    ) -> None:
        """A stage of `parent`, of which only beginning and length are known; none without length."""
        if seconds > 0.0:
            self.end(self.start(name, parent, attributes, at=start), start + seconds)

    def close(self) -> None:
        """Sends the spans that are left, within some seconds."""
        self._close()

    def _nanoseconds(self, moment: float | None) -> int:
        return int((self.clock() if moment is None else moment) * 1e9) + self._offset()
