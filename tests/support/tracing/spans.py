"""Spans kept in this process, for tests of what a service records."""

from __future__ import annotations

from dataclasses import dataclass, field

from triptych.tracing.sampling import Sampler
from triptych.tracing.span import FinishedSpan
from triptych.tracing.tracer import Tracer


@dataclass
class KeptSpans:
    """A `SpanSink` that keeps everything, in the order of the spans' ends."""

    spans: list[FinishedSpan] = field(default_factory=list)
    closed: bool = False

    def add(self, span: FinishedSpan) -> None:
        self.spans.append(span)

    def close(self) -> None:
        self.closed = True

    def one(self, name: str) -> FinishedSpan:
        """The only span of this name."""
        [span] = self.all(name)
        return span

    def all(self, name: str) -> list[FinishedSpan]:
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
    ratio: float = 1.0, *, trusts_parent: bool = True, clock: TickingClock | None = None
) -> tuple[Tracer, KeptSpans]:
    """A tracer with an in-memory sink, which draws 0.5 for every request."""
    kept = KeptSpans()
    sampler = Sampler(ratio, trusts_parent)
    tracer = (
        Tracer(kept, sampler, draw=lambda: 0.5)
        if clock is None
        else Tracer(kept, sampler, clock=clock, draw=lambda: 0.5)
    )
    return tracer, kept
