from __future__ import annotations

import pytest

from support.tracing.spans import KeptSpans, kept_tracer
from triptych.tracing.context import SpanContext
from triptych.tracing.sampling import Sampler
from triptych.tracing.tracer import Tracer

LOW_TRACE = "0" * 31 + "1"


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("parent", [None, True, False])
@pytest.mark.parametrize("trusts", [True, False])
def test_a_ratio_of_zero_records_nothing_whatever_a_caller_says(
    parent: bool | None, draw: float, trusts: bool
) -> None:
    assert Sampler(0.0, trusts).decide(parent, draw) is False


def test_a_trusted_callers_flag_decides() -> None:
    assert Sampler(0.001).decide(True, 0.999) is True
    assert Sampler(1.0).decide(False, 0.0) is False


@pytest.mark.parametrize(("draw", "recorded"), [(0.0, True), (0.24, True), (0.25, False), (0.9, False)])
@pytest.mark.parametrize("flag", [True, False, None])
def test_a_client_that_is_not_trusted_has_no_say(flag: bool | None, draw: float, recorded: bool) -> None:
    assert Sampler(0.25, trusts_parent=False).decide(flag, draw) is recorded


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999999])
def test_a_ratio_of_one_records_every_request_without_a_caller(draw: float) -> None:
    assert Sampler(1.0).decide(None, draw) is True


def test_a_hostile_client_cannot_have_all_its_requests_recorded() -> None:
    """Neither the flag nor a trace id that samplers by id would take."""
    draws = iter([0.05, 0.5, 0.9, 0.11] * 25)
    tracer = Tracer(KeptSpans(), Sampler(0.1, trusts_parent=False), draw=lambda: next(draws))
    parent = SpanContext(LOW_TRACE, "b7ad6b7169203331", True)
    recorded = [tracer.enter(parent).sampled for _ in range(100)]
    assert sum(recorded) == 25


def test_a_callers_trace_goes_on_though_it_is_not_recorded() -> None:
    tracer, kept = kept_tracer(0.1, trusts_parent=False)
    parent = SpanContext(LOW_TRACE, "b7ad6b7169203331", True, "a=1")
    context = tracer.enter(parent)
    assert (context.trace_id, context.state, context.sampled) == (LOW_TRACE, "a=1", False)
    tracer.stage("unseen", context, 1.0, 1.0)
    assert kept.spans == []


def test_a_stage_without_length_is_none() -> None:
    tracer, kept = kept_tracer()
    context = tracer.enter(None)
    tracer.stage("never reached", context, 5.0, 0.0)
    tracer.stage("reached", context, 5.0, 2.0)
    assert [(span.name, span.start, span.end, span.parent) for span in kept.spans] == [
        ("reached", 5.0, 7.0, context)
    ]
