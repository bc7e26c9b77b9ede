"""Sampling: whether a request's trace is recorded, decided once where the request enters the process."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult
from opentelemetry.trace import Link, SpanKind, TraceState, get_current_span
from opentelemetry.util.types import Attributes


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
