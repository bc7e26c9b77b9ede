"""Span: one finished stretch of work, as plain values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from triptych.tracing.context import SpanContext

Value = str | bool | int | float | tuple[str, ...]
Attributes = Mapping[str, Value]


class SpanKind(enum.Enum):
    """A span's part in a call between processes."""

    INTERNAL = "INTERNAL"
    SERVER = "SERVER"
    CLIENT = "CLIENT"


@dataclass(frozen=True, slots=True)
class Event:
    """A moment within a span, in the same seconds as the span's."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class FinishedSpan:
    """A finished span. `start` and `end` are seconds of `time.monotonic`; `error` names what went wrong."""

    name: str
    context: SpanContext
    parent: SpanContext | None
    start: float
    end: float
    attributes: Attributes
    kind: SpanKind = SpanKind.INTERNAL
    links: tuple[SpanContext, ...] = ()
    events: tuple[Event, ...] = ()
    error: str = ""
