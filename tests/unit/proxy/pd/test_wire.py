"""Events of a PD worker's stream as the proxy delivers them, and the load that comes with its beats."""

from __future__ import annotations

from array import array
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.data.items import bare_plan
from support.data.job_events import job_planned
from support.data.pd_events import pd_admitted
from triptych.base.types import SamplingParams
from triptych.pd_worker.events.stream_message import StreamMessage
from triptych.protos import common_pb2, pd_pb2
from triptych.proxy.call.chat import ChatCall, RawPrompt
from triptych.proxy.events import Fetched, LookedUp, RequestEvent, lost, told
from triptych.proxy.media.source import ItemMedia
from triptych.proxy.pd.lengths import min_tokens, takes, too_long
from triptych.proxy.pd.load_reports import FRESH_SECONDS, LoadReports
from triptych.proxy.pd.wire import deliver, submit_message
from triptych.proxy.requests.request import InFlightRequest
from triptych.proxy.splitter import SplitItem, SplitRequest
from triptych.proxy.workers import Binding


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


def test_an_offer_is_delivered_behind_the_tokens_that_it_came_with() -> None:
    offer = tokens("r")
    offer.tokens.offered = True
    events = Events()
    events.deliver = lambda request_id, event: events.calls.append(("offer", request_id))  # type: ignore[method-assign]
    assert delivered(events, offer, tokens("r")) == [("tokens", "r"), ("offer", "r"), ("tokens", "r")]


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
RESUMED = (20, 5)


@pytest.mark.parametrize(
    ("asked", "items", "sent", "tokens"),
    [
        (call("a long text"), (), (), 1),
        (call(), (), (), 1),
        (call(max_tokens=7), (), (), 7),
        (call((1, 2, 3)), (), (), 4),
        (call((1, 2, 3), 10), (), (), 13),
        (call(max_tokens=2), (16, 16, 4), (), 38),
        (call("text"), (16,), RESUMED, 25),
        (call("text", 5), (16,), RESUMED, 25),
        (call("text", 50), (16,), RESUMED, 70),
    ],
)
def test_ids_items_and_what_is_resumed_are_known_and_text_counts_nothing(asked, items, sent, tokens):
    assert min_tokens(asked, items, *sent) == tokens


def submitted(*, resumes: bool, keeps_items: bool) -> pd_pb2.SubmitRequest:
    """The Submit of a request with an item in the store, one expected at its worker, and a new one."""
    slots = tuple(SplitItem(key, cast(ItemMedia, None), "", {}) for key in "abca")
    request = InFlightRequest(call(), 1, 10.0, "r", split=SplitRequest(b"[]", slots, ()))
    request.binding = Binding("k", "n")
    machine, plans = request.lifecycle, {key: bare_plan(key) for key in "abc"}
    machine.deliver(Fetched(dict.fromkeys("abc", ""), 0.0))
    machine.deliver(LookedUp({"a": plans["a"]}, {"b": plans["b"]}))
    machine.deliver(job_planned("c", plans["c"]))
    if resumes:
        machine.deliver(pd_admitted(1, (7, 8, 9), [(0, 2)]))
        machine.tokens(1, 0, [5], "ñ")
        machine.deliver(lost(1))
    return submit_message(request, "p", 3.0, keeps_items=keeps_items)


@pytest.mark.parametrize("keeps_items", [True, False])
def test_a_worker_is_told_of_every_slot_what_is_known_of_its_item(keeps_items: bool) -> None:
    message = submitted(resumes=False, keeps_items=keeps_items)
    held = pd_pb2.ITEM_STATE_UNENCODED if keeps_items else pd_pb2.ITEM_STATE_READY
    states = [(slot.plan.mm_hash, slot.state) for slot in message.items]
    ready, pending = pd_pb2.ITEM_STATE_READY, pd_pb2.ITEM_STATE_PENDING
    assert states == [("a", ready), ("b", held), ("c", pending), ("a", ready)]
    assert (message.request_id, message.attempt, message.proxy_id, message.timeout) == ("r", 1, "p", 3.0)
    assert not message.HasField("resume")


def test_the_next_worker_goes_on_from_the_prompt_and_the_output_of_the_last_one() -> None:
    message = submitted(resumes=True, keeps_items=True)
    assert message.attempt == 2
    assert message.resume == pd_pb2.Resume(
        prompt_token_ids=(7, 8, 9),
        placements=[pd_pb2.ItemPlacement(offset=0, length=2)],
        output_token_ids=(5,),
        text_sent_chars=1,
    )


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
        (call(param="documents[3]"), 513, "documents[3]", "shorten documents[3]"),
    ],
)
def test_the_error_names_the_field_to_shorten_and_the_largest_limit(asked, tokens, param, words):
    error = too_long(asked, tokens, 512)
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", param)
    assert words in error.message
    assert "the model takes 512" in error.message
