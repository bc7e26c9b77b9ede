"""Which requests are recorded, whoever sends them."""

from __future__ import annotations

import pytest

from support.tracing.spans import kept_tracer, new_context
from triptych.base.tracing.tracer import Tracer

LOW_TRACE = "0" * 31 + "1"


def recorded(tracer: Tracer, flag: bool | None) -> bool:
    """Whether a request is recorded whose caller's flag is this; None: it has no caller."""
    parent = None if flag is None else new_context(sampled=flag, trace_id=LOW_TRACE)
    return tracer.start("request", parent).is_recording()


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("flag", [None, True, False])
@pytest.mark.parametrize("trusts", [True, False])
def test_a_ratio_of_zero_records_nothing_whatever_a_caller_says(flag, draw, trusts):
    assert recorded(kept_tracer(0.0, trusts_parent=trusts, draw=lambda: draw)[0], flag) is False


def test_a_trusted_callers_flag_decides() -> None:
    assert recorded(kept_tracer(0.001, draw=lambda: 0.999)[0], True) is True
    assert recorded(kept_tracer(1.0, draw=lambda: 0.0)[0], False) is False


@pytest.mark.parametrize(("draw", "expected"), [(0.0, True), (0.24, True), (0.25, False), (0.9, False)])
@pytest.mark.parametrize("flag", [True, False, None])
def test_a_client_that_is_not_trusted_has_no_say(flag: bool | None, draw: float, expected: bool) -> None:
    assert recorded(kept_tracer(0.25, trusts_parent=False, draw=lambda: draw)[0], flag) is expected


def test_a_hostile_client_cannot_have_all_its_requests_recorded() -> None:
    """Neither the flag nor a trace id that samplers by id would take."""
    draws = iter([0.05, 0.5, 0.9, 0.11] * 25)
    tracer, _ = kept_tracer(0.1, trusts_parent=False, draw=lambda: next(draws))
    assert sum(recorded(tracer, True) for _ in range(100)) == 25


def test_a_callers_trace_goes_on_though_it_is_not_recorded() -> None:
    tracer, kept = kept_tracer(0.1, trusts_parent=False)
    parent = new_context(sampled=True, trace_id=LOW_TRACE, state="a=1")
    context = tracer.start("request", parent).get_span_context()
    assert (context.trace_id, context.trace_state, context.trace_flags.sampled) == (
        parent.trace_id,
        parent.trace_state,
        False,
    )
    tracer.stage("unseen", context, 1.0, 1.0)
    assert kept.spans == []


@pytest.mark.parametrize("trusts", [True, False])
def test_spans_of_one_process_are_recorded_together(trusts: bool) -> None:
    draws = iter([0.05, 0.9])
    tracer, kept = kept_tracer(0.1, trusts_parent=trusts, draw=lambda: next(draws))
    for _ in range(2):
        tracer.stage("stage", tracer.start("request", None).get_span_context(), 1.0, 1.0)
    assert kept.names() == ["stage"]
