"""Tracer: the entry point for a service's spans. A service without traces has none, and does nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Protocol

from triptych.tracing.context import SpanContext, new_context
from triptych.tracing.sampling import Sampler
from triptych.tracing.span import Attributes, FinishedSpan, SpanKind


class SpanSink(Protocol):
    """Taker of finished spans; never blocks and never raises. `close` sends what is left, within a time."""

    def add(self, span: FinishedSpan) -> None: ...

    def close(self) -> None: ...


class Tracer:
    """Decides which requests are recorded, and passes their spans on. `clock` is in seconds."""

    def __init__(
        self,
        sink: SpanSink,
        sampler: Sampler,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._sink = sink
        self._sampler = sampler
        self._draw = draw
        self.clock = clock

    def enter(self, parent: SpanContext | None) -> SpanContext:
        """The context of the first span of a request in this process: a child of the caller's, if any.

        The caller's trace goes on in any case; whether it is recorded is the sampler's decision.
        """
        sampled = self._sampler.decide(None if parent is None else parent.sampled, self._draw())
        if parent is None:
            return new_context(sampled=sampled)
        child = parent.child()
        return SpanContext(child.trace_id, child.span_id, sampled, child.state)

    def record(self, span: FinishedSpan) -> None:
        """Takes a finished span, if its trace is recorded."""
        if span.context.sampled:
            self._sink.add(span)

    def stage(
        self,
        name: str,
        parent: SpanContext,
        start: float,
        seconds: float,
        attributes: Attributes | None = None,
        links: tuple[SpanContext, ...] = (),
    ) -> None:
        """Takes a stage of `parent`, of which only beginning and length are known; none without length."""
        if seconds > 0.0:
            end = start + seconds
            span = FinishedSpan(
                name, parent.child(), parent, start, end, attributes or {}, SpanKind.INTERNAL, links
            )
            self.record(span)

    def close(self) -> None:
        """Sends the spans that are left, within the sink's time."""
        self._sink.close()
