"""Spans kept in this process, for tests of what a service records."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, TraceFlags, TraceState

from triptych.base.tracing.context import SpanContext
from triptych.base.tracing.otlp import request_sampler
from triptych.base.tracing.tracer import Tracer


def new_context(*, sampled: bool, state: str = "", trace_id: str = "", span_id: str = "") -> SpanContext:
    """The context of another process's span, with ids in hex, or drawn ones."""
    return SpanContext(
        int(trace_id, 16) if trace_id else random.getrandbits(128) | 1,
        int(span_id, 16) if span_id else random.getrandbits(64) | 1,
        True,
        TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT),
        TraceState.from_header([state]) if state else TraceState(),
    )


def remote(context: SpanContext) -> SpanContext:
    """The context as another process has it."""
    return SpanContext(context.trace_id, context.span_id, True, context.trace_flags, context.trace_state)


@dataclass(frozen=True)
class KeptSpan:
    """A span that has ended: its contexts as another process has them, its moments in seconds."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start: float
    end: float
    attributes: Mapping[str, Any]
    kind: SpanKind
    links: tuple[SpanContext, ...]
    events: tuple[str, ...]
    error: str


@dataclass
class KeptSpans(SpanProcessor):
    """Keeps everything, in the order of the spans' ends."""

    spans: list[KeptSpan] = field(default_factory=list)
    closed: bool = False

    def on_end(self, span: ReadableSpan) -> None:
        assert span.context is not None and span.start_time is not None and span.end_time is not None
        self.spans.append(
            KeptSpan(
                span.name,
                remote(span.context),
                None if span.parent is None else remote(span.parent),
                span.start_time / 1e9,
                span.end_time / 1e9,
                dict(span.attributes or {}),
                span.kind,
                tuple(remote(link.context) for link in span.links),
                tuple(event.name for event in span.events),
                "" if span.status.is_ok else span.status.description or "",
            )
        )

    def close(self) -> None:
        self.closed = True

    def one(self, name: str) -> KeptSpan:
        """The only span of this name."""
        [span] = self.all(name)
        return span

    def all(self, name: str) -> list[KeptSpan]:
        return [span for span in self.spans if span.name == name]

    def names(self) -> list[str]:
        return [span.name for span in self.spans]


class TickingClock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def kept_tracer(
    ratio: float = 1.0,
    *,
    trusts_parent: bool = True,
    clock: Callable[[], float] = time.monotonic,
    draw: Callable[[], float] = lambda: 0.5,
) -> tuple[Tracer, KeptSpans]:
    """A tracer whose spans are kept, with times of its `clock`; it draws 0.5 for every request."""
    kept = KeptSpans()
    provider = TracerProvider(
        request_sampler(ratio, trusts_parent=trusts_parent, draw=draw), shutdown_on_exit=False
    )
    provider.add_span_processor(kept)
    return Tracer(provider.get_tracer("tests"), kept.close, clock=clock, offset=lambda: 0), kept
