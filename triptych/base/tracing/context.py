"""Span contexts between processes, in W3C's headers, gRPC metadata and a binary form; producers of items."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    TraceFlags,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = ["SpanContext"]

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
#: Bytes of a context without its state.
CONTEXT_BYTES = 25

_MAX_PARENT = 128
#: What W3C asks to propagate at least.
_MAX_STATE = 512
_W3C = TraceContextTextMapPropagator()
# It logs the members of a state that is not valid: a client's own words.
logging.getLogger("opentelemetry.trace.span").disabled = True


def carrying(context: SpanContext | None) -> Context:
    """OpenTelemetry's carrier with this span as the current one; without a span for None."""
    return Context() if context is None else set_span_in_context(NonRecordingSpan(context), Context())


def metadata(context: SpanContext) -> tuple[tuple[str, str], ...]:
    """The context as headers of a gRPC call: its traceparent, and its tracestate where it has one.

    None for a context that is not valid, as all are with OTEL_SDK_DISABLED.
    """
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, carrying(context))
    return tuple(carrier.items())


def hex_trace_id(context: SpanContext) -> str:
    """The trace's id, for logs."""
    return format_trace_id(context.trace_id)


def to_bytes(context: SpanContext) -> bytes:
    """The ids and flags, without the state."""
    flags = context.trace_flags & TraceFlags.SAMPLED
    return context.trace_id.to_bytes(16) + context.span_id.to_bytes(8) + bytes([flags])


def from_bytes(raw: bytes) -> SpanContext | None:
    """The context of `to_bytes`; None for other bytes."""
    if len(raw) != CONTEXT_BYTES:
        return None
    flags = TraceFlags(raw[24] & TraceFlags.SAMPLED)
    context = SpanContext(int.from_bytes(raw[:16]), int.from_bytes(raw[16:24]), True, flags)
    return context if context.is_valid else None


def parse_traceparent(parent: str, state: str = "") -> SpanContext | None:
    """The caller's context; None for a traceparent that is not valid. An invalid state is dropped alone."""
    parent = parent.strip(" \t")
    if len(parent) > _MAX_PARENT or not parent.isprintable():
        return None
    carrier = {TRACEPARENT: parent, TRACESTATE: state if len(state) <= _MAX_STATE else ""}
    context = get_current_span(_W3C.extract(carrier, Context())).get_span_context()
    return context if context.is_valid else None


def context_of(headers: Iterable[tuple[str | bytes, str | bytes]]) -> SpanContext | None:
    """The caller's context in HTTP headers or gRPC metadata, whose names are in lower case.

    None where it is missing, given twice, or no text.
    """
    parents, states = [], []
    for name, value in headers:
        key = name.decode("latin-1") if isinstance(name, bytes) else name
        if key == TRACEPARENT:
            parents.append(_text(value))
        elif key == TRACESTATE:
            states.append(_text(value))
    return parse_traceparent(parents[0], ",".join(states)) if len(parents) == 1 else None


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


class Producers:
    """The producing spans of the latest items, by mm_hash; safe between threads.

    An encoder worker notes an item's span before it saves the embedding, whose stored header carries it; a
    PD worker notes what comes with a load, and links the spans of all that read the item from its cache.
    """

    def __init__(self, maximum: int = 8192) -> None:
        self._maximum = maximum
        self._lock = threading.Lock()
        self._contexts: OrderedDict[str, bytes] = OrderedDict()

    def note(self, mm_hash: str, context: bytes) -> None:
        """The item's producer; empty: it is not known any more."""
        with self._lock:
            self._contexts.pop(mm_hash, None)
            if context:
                self._contexts[mm_hash] = context
            if len(self._contexts) > self._maximum:
                self._contexts.popitem(last=False)

    def raw(self, mm_hash: str) -> bytes:
        """The producer as it is stored; empty where there is none."""
        with self._lock:
            return self._contexts.get(mm_hash, b"")

    def links(self, mm_hash: str) -> tuple[SpanContext, ...]:
        """The producer as a span's links: one, or none."""
        context = from_bytes(self.raw(mm_hash))
        return () if context is None else (context,)
