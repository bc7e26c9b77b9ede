"""Events of a PD worker's stream as the proxy delivers them, and the load that comes with its beats."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.base.types import SamplingParams
from triptych.pd_worker.events.streams import StreamMessage
from triptych.protos import common_pb2, pd_pb2
from triptych.proxy.call.chat import ChatCall, RawPrompt
from triptych.proxy.events import RequestEvent, told
from triptych.proxy.pd.lengths import min_tokens, takes, too_long
from triptych.proxy.pd.load_reports import FRESH_SECONDS, LoadReports
from triptych.proxy.pd.wire import deliver
from triptych.proxy.requests.instructions import ResumeState


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
        self.calls.append((told(event) or type(event).__name__.lower(), request_id))


def tokens(request_id: str) -> pd_pb2.RequestEvent:
    logprobs = [common_pb2.PositionLogprobs()]
    return pd_pb2.RequestEvent(
        request_id=request_id, attempt=1, tokens=pd_pb2.Tokens(token_ids=[5], text="t", logprobs=logprobs)
    )


def ended(request_id: str, reason: str) -> pd_pb2.RequestEvent:
    return pd_pb2.RequestEvent(request_id=request_id, attempt=1, finished=pd_pb2.Finished(reason=reason))


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


def test_events_are_delivered_as_they_are_and_those_of_a_later_release_are_not() -> None:
    end, later = ended("r", "stop"), pd_pb2.RequestEvent(request_id="r", attempt=1)
    events = Events()
    assert delivered(events, later, end) == [("finished", "r")]


def step_of(*entries: tuple[str, list[int], str]) -> pd_pb2.StepEvents:
    message = StreamMessage()
    for name, ids, text in entries:
        message.add_tokens(name, 1, 5, array("I", ids), text)
    found = message.to_proto(None)
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


def beat(tokens: int = 0, **given: float) -> pd_pb2.Beat:
    load = pd_pb2.PDLoad(running=3, waiting=2, kv_usage=0.5, cache_usage=0.25, generated_tokens=tokens)
    for name, value in given.items():
        setattr(load, name, value)
    return pd_pb2.Beat(count=1, patience=1.0, load=load)


def test_the_newest_report_is_kept_while_it_is_fresh() -> None:
    reports = LoadReports()
    assert reports.latest(0.0) is None
    reports.observe(beat(), 10.0)
    found = reports.latest(10.5)
    assert (found.running, found.waiting, found.kv_usage, found.cache_usage) == (3, 2, 0.5, 0.25)
    assert found.tokens_per_second == 0.0
    assert reports.latest(10.0 + FRESH_SECONDS) is None


@pytest.mark.parametrize(("tokens", "rate"), [(400, 150.0), (7, 0.0)], ids=["goes on", "started anew"])
def test_tokens_of_a_second_come_from_two_reports_and_are_never_negative(tokens: int, rate: float) -> None:
    reports = LoadReports()
    reports.observe(beat(100), 10.0)
    reports.observe(beat(tokens), 12.0)
    found = reports.latest(12.0)
    assert found is not None and found.tokens_per_second == rate


def test_a_beat_without_a_load_is_of_an_earlier_release() -> None:
    reports = LoadReports()
    reports.observe(pd_pb2.Beat(count=1, patience=1.0), 10.0)
    assert reports.latest(10.0) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 7.0])
def test_shares_lie_between_0_and_1_whatever_a_worker_sends(value: float) -> None:
    reports = LoadReports()
    reports.observe(beat(kv_usage=value, cache_usage=value), 10.0)
    found = reports.latest(10.0)
    assert 0.0 <= found.kv_usage <= 1.0 and 0.0 <= found.cache_usage <= 1.0


def call(prompt: RawPrompt | None = None, max_tokens: int | None = None, param: str = "prompt") -> ChatCall:
    sampling = SamplingParams(max_tokens=max_tokens)
    return ChatCall("r", "m", (), sampling, 1.0, prompt=prompt, prompt_param=param)


#: One whose output fills the model length has only its end to be told: it is known whole.
RESUMED = ResumeState((1,) * 20, (), (2,) * 5, 9)


@pytest.mark.parametrize(
    ("asked", "items", "resume", "tokens"),
    [
        (call("a long text"), (), None, 1),
        (call(), (), None, 1),
        (call(max_tokens=7), (), None, 7),
        (call((1, 2, 3)), (), None, 4),
        (call((1, 2, 3), 10), (), None, 13),
        (call(max_tokens=2), (16, 16, 4), None, 38),
        (call("text"), (16,), RESUMED, 25),
        (call("text", 5), (16,), RESUMED, 25),
        (call("text", 50), (16,), RESUMED, 70),
    ],
)
def test_ids_items_and_what_is_resumed_are_known_and_text_counts_nothing(asked, items, resume, tokens):
    assert min_tokens(asked, items, resume) == tokens


def test_a_limit_is_what_prompt_and_output_may_have_together() -> None:
    assert [takes(10, tokens) for tokens in (9, 10, 11)] == [True, True, False]
    assert takes(0, 10**9)


@pytest.mark.parametrize(
    ("asked", "tokens", "param", "words"),
    [
        (call(max_tokens=600), 600, "max_tokens", "max_tokens is 600"),
        (call((1,) * 500, 100), 600, "max_tokens", "the prompt has at least 500"),
        (call((1,) * 600, 8), 608, "prompt", "at least 600 tokens"),
        (call((1,) * 600, 8, "decoder_prompt"), 608, "decoder_prompt", "shorten decoder_prompt"),
        (call(), 513, "messages", "at least 512 tokens"),
    ],
)
def test_the_error_names_the_field_to_shorten_and_the_largest_limit(asked, tokens, param, words):
    error = too_long(asked, tokens, 512)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", param)
    assert words in error.message
    assert "the model takes 512" in error.message
