"""Events of a PD worker's stream as the proxy delivers them."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.pd_worker.events.streams import StreamMessage
from triptych.protos import common_pb2, pd_pb2
from triptych.proxy.events import Lost, RequestEvent
from triptych.proxy.pd.wire import deliver


class Events:
    """Keeps what is delivered; tokens of the request "broken" raise."""

    def __init__(self, *with_logprobs: str) -> None:
        self.with_logprobs = set(with_logprobs)
        self.calls: list[tuple[str, ...]] = []
        self.logprobs: dict[str, int] = {}
        self.said: list[tuple[Any, ...]] = []

    def tokens(self, request_id: str, *args: Any) -> None:
        if request_id == "broken":
            raise ValueError("no such position")
        if len(args) == 5:
            self.logprobs[request_id] = len(args[-1])
        self.said.append((request_id, *args))
        self.calls.append(("tokens", request_id))

    def deliver(self, request_id: str, event: RequestEvent) -> None:
        backs_off = isinstance(event, Lost) and event.back_off
        self.calls.append(("back off" if backs_off else type(event).__name__.lower(), request_id))


def tokens(request_id: str) -> pd_pb2.RequestEvent:
    logprobs = [common_pb2.PositionLogprobs()]
    return pd_pb2.RequestEvent(
        request_id=request_id, attempt=1, tokens=pd_pb2.Tokens(token_ids=[5], text="t", logprobs=logprobs)
    )


def ended(request_id: str, reason: str, code: str = "") -> pd_pb2.RequestEvent:
    error = common_pb2.Error(code=code, message="no") if code else None
    return pd_pb2.RequestEvent(
        request_id=request_id, attempt=1, finished=pd_pb2.Finished(reason=reason, error=error)
    )


def delivered(events: Events, *step: pd_pb2.RequestEvent) -> list[tuple[str, ...]]:
    deliver(pd_pb2.StepEvents(events=step), events)  # type: ignore[arg-type]
    return events.calls


def test_log_probabilities_are_read_only_for_requests_that_asked() -> None:
    events = Events("asked")
    delivered(events, tokens("asked"), tokens("not"))
    assert events.logprobs == {"asked": 1, "not": 0}


def test_an_event_that_makes_no_sense_fails_its_request_alone() -> None:
    assert delivered(Events(), tokens("broken"), tokens("well")) == [
        ("requestfailed", "broken"),
        ("tokens", "well"),
    ]


def test_an_end_without_an_answer_goes_on_elsewhere_unless_the_request_is_at_fault() -> None:
    ends = [ended("a", "abort"), ended("u", "error", "unavailable"), ended("i", "error", "invalid_request")]
    assert delivered(Events(), *ends) == [("back off", "a"), ("back off", "u"), ("refused", "i")]


def test_an_answers_end_is_finished() -> None:
    assert delivered(Events(), ended("r", "stop")) == [("finished", "r")]


def step_of(*entries: tuple[str, list[int], str]) -> pd_pb2.StepEvents:
    message = StreamMessage()
    for name, ids, text in entries:
        message.add_tokens(name, 1, 5, array("I", ids), text)
    found = message.to_proto(None)
    assert found is not None
    return pd_pb2.StepEvents.FromString(found.SerializeToString())


ENTRY = st.tuples(st.text("rs", max_size=3), st.lists(st.integers(0, 2**32 - 1), max_size=3), st.text())


@given(st.lists(ENTRY, min_size=1, max_size=8))
def test_lists_say_what_each_request_has_put_out(entries: list[tuple[str, list[int], str]]) -> None:
    events = Events()
    deliver(step_of(*entries), events)  # type: ignore[arg-type]
    assert events.said == [(name, 1, 5, ids, text) for name, ids, text in entries]


def test_one_requests_tokens_that_make_no_sense_fail_it_alone() -> None:
    events = Events()
    deliver(step_of(("broken", [5], "a"), ("well", [6], "b")), events)  # type: ignore[arg-type]
    assert events.calls == [("requestfailed", "broken"), ("tokens", "well")]


@pytest.mark.parametrize("field", ["request_ids", "attempts", "positions", "texts", "token_ids", "counts"])
def test_lists_that_do_not_fit_together_are_delivered_to_nobody(field: str) -> None:
    step = step_of(("r1", [5, 6], "a"), ("r2", [7], "b"))
    getattr(step.tokens, field).pop()
    events = Events()
    with pytest.raises(ValueError):
        deliver(step, events)  # type: ignore[arg-type]
    assert events.calls == []
