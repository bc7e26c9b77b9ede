"""The recorder of a call and the trace of a request."""

from __future__ import annotations

import pytest

from support.data.items import bare_plan, make_plan
from support.data.job_events import job_failed, job_planned, job_ready
from support.data.pd_events import pd_admitted, pd_finished, pd_missing
from support.tracing.spans import KeptSpan, KeptSpans, TickingClock, kept_tracer, remote
from triptych.base.errors import InvalidRequest, RequestError
from triptych.base.metrics import ProxyMetrics
from triptych.base.tracing.server_span import ServerSpan
from triptych.base.tracing.tracer import SpanKind
from triptych.base.types import SamplingParams
from triptych.protos import pd_pb2
from triptych.proxy.admission import make_choices
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.events import (
    Accepted,
    CallEnded,
    ClientLeft,
    EncodersBack,
    EncodersGone,
    Ended,
    Fetched,
    FirstToken,
    JobEvent,
    LookedUp,
    RequestEvent,
    SuccessorBegun,
    SuccessorSent,
    WorkerEvent,
    lost,
)
from triptych.proxy.requests.instructions import HandOver, KeepAttempt, LookUpItems, Submit, TakeOver
from triptych.proxy.requests.lifecycle import Lifecycle
from triptych.proxy.requests.recorder import Event, Items, Recorder, RequestTrace
from triptych.proxy.requests.request import Choices


class Watcher:
    """A view of every call's first choice, and the observer that hands it out."""

    def __init__(self) -> None:
        self.seen: list[tuple[Event, float, str]] = []
        self.ended: list[tuple[int, RequestError | None]] = []
        self.items: list[JobEvent] = []

    def observe(self, event: Event, at: float, address: str, items: Items) -> None:
        self.seen.append((event, at, address))

    def opened(self, choices: Choices) -> Watcher:
        return self

    def closed(self, choices: Choices, failure: RequestError | None) -> None:
        self.ended.append((choices.status, failure))

    def encoded(self, end: JobEvent) -> None:
        self.items.append(end)


class Recorded:
    """One call of two choices, and its recorder."""

    def __init__(self, *, watched: bool = True, ratio: float | None = None) -> None:
        self.watcher, self.clock, self.metrics = Watcher(), TickingClock(), ProxyMetrics()
        call = ChatCall("mine", "m", (), SamplingParams(), 1.0, n=2)
        self.choices = make_choices(call, 1, 0.0)
        self.first, self.second = self.choices.requests
        self.recorder = Recorder(self.metrics, self.clock, lambda name: name)
        if watched:
            self.recorder.subscribe(self.watcher)
        tracer, self.kept = kept_tracer(ratio or 1.0, clock=self.clock)
        self.recorder.open(self.choices, None if ratio is None else ServerSpan(tracer, None, "chat", {}))

    def events(self) -> list[Event]:
        return [event for event, _, _ in self.watcher.seen]


def test_events_reach_the_first_choices_view_in_order_and_with_their_moments() -> None:
    r = Recorded()
    r.recorder.record(r.first, Submit(1))
    r.clock.now = 101.0
    r.recorder.record(r.second, Submit(1))
    r.recorder.record(r.first, FirstToken())
    assert r.watcher.seen == [(Submit(1), 100.0, ""), (FirstToken(), 101.0, "")]


def test_a_view_sees_an_event_before_the_instructions_that_follow_from_it() -> None:
    r = Recorded()
    r.recorder.record(r.first, FirstToken(), [LookUpItems(("a",)), Submit(1)])
    assert [event for event, _, _ in r.watcher.seen] == [FirstToken(), LookUpItems(("a",)), Submit(1)]


def test_a_call_ends_once_after_all_its_choices() -> None:
    r = Recorded(ratio=1.0)
    r.second.first_token, r.first.first_token = 2.0, 3.0
    r.recorder.close(r.choices, None)
    assert r.events() == [Ended(), CallEnded(499, 0, 0, 2.0)]
    assert r.watcher.ended == [(499, None)]


def test_a_ready_item_is_told_once_for_its_job() -> None:
    r = Recorded()
    end = job_ready("a", make_plan(rows=4, width=8), encode=2.0, save=3.0)
    r.recorder.encoded(end)
    assert r.watcher.items == [end]


@pytest.mark.parametrize("ratio", [None, 0.1])
def test_what_nobody_watches_has_no_views(ratio: float | None) -> None:
    r = Recorded(watched=False, ratio=ratio)
    r.recorder.record(r.first, LookUpItems(("a",)))
    r.recorder.close(r.choices, None)
    assert [request.views for request in r.choices.requests] == [(), ()]
    assert r.kept.spans == []


def test_a_sampled_call_has_a_trace_of_every_choice() -> None:
    r = Recorded(ratio=1.0)
    for request in r.choices.requests:
        r.recorder.record(request, Submit(1))
    r.recorder.close(r.choices, None)
    choices = [span.attributes.get("triptych.request.choice") for span in r.kept.all("PD attempt")]
    assert choices == [None, 1]


def test_resumes_and_resubmissions_are_counted_apart_whether_anybody_watches_or_not() -> None:
    r = Recorded(watched=False)
    for order in (Submit(1), Submit(2), Submit(3, resumes=True), Submit(4, resumes=True)):
        r.recorder.record(r.first, lost(1), [order])
    (family,) = r.metrics.resumes.collect()
    counts = {
        sample.labels["reason"]: sample.value for sample in family.samples if sample.name.endswith("_total")
    }
    assert counts == {"resume": 2, "resubmit": 1}


def test_hand_overs_are_counted_by_their_results_and_are_no_resumes() -> None:
    r = Recorded(watched=False)
    orders = (HandOver(2), HandOver(3, behind=True), TakeOver(3), TakeOver(4, lost=True), KeepAttempt())
    r.recorder.record(r.first, FirstToken(), orders)
    (family,) = r.metrics.hand_overs.collect()
    counts = {
        sample.labels["result"]: sample.value for sample in family.samples if sample.name.endswith("_total")
    }
    assert counts == {"behind": 1, "taken": 1, "after_loss": 1, "kept": 1}
    (family,) = r.metrics.resumes.collect()
    assert not [sample for sample in family.samples if sample.name.endswith("_total")]


FIRST, SECOND = "a" * 64, "b" * 64


class Traced:
    """A state machine whose events and instructions its trace sees, as in the dispatcher."""

    def __init__(self, *keys: str, ratio: float = 1.0) -> None:
        self.clock = TickingClock()
        self.kept: KeptSpans
        tracer, self.kept = kept_tracer(ratio, clock=self.clock)
        self.server = ServerSpan(tracer, None, "chat", {})
        self.trace = RequestTrace(self.server, "r1", 0)
        self.views = [self.trace] if self.server.recording else []
        self.keys, self.machine, self.address = keys, Lifecycle(), ""

    def see(self, event: Event, at: float) -> None:
        self.clock.now = at
        for view in self.views:
            view.observe(event, at, self.address, self.machine.items)

    def deliver(self, event: RequestEvent, at: float) -> None:
        orders = self.machine.deliver(event)
        for each in (event, *orders):
            self.see(each, at)

    def begin(self, at: float) -> None:
        self.deliver(Fetched(dict.fromkeys(self.keys, "image"), 0.0), at)

    def look_up(self, at: float, *stored: str) -> None:
        self.deliver(LookedUp({key: bare_plan(key) for key in stored}), at)

    def accept(self, at: float) -> None:
        self.deliver(Accepted(self.machine.attempt), at)
        self.address = "127.0.0.1:5000"

    def ready(self, key: str, at: float) -> None:
        self.deliver(job_ready(key, bare_plan(key), encode=0.1, save=0.1), at)

    def finish(self, at: float) -> None:
        self.deliver(pd_finished(self.machine.attempt, 5, 3, 2), at)

    def attempts(self) -> list[KeptSpan]:
        return self.kept.all("PD attempt")


def test_a_request_with_an_item_has_all_its_stages() -> None:
    t = Traced(FIRST)
    t.begin(101.0)
    t.look_up(102.0)
    item = t.trace.item(t.machine.items[FIRST])
    t.deliver(job_planned(FIRST, bare_plan(FIRST)), 103.0)
    attempt = t.trace.attempt
    t.accept(103.5)
    t.deliver(pd_admitted(1, (7, 8), [(0, 1)]), 104.0)
    t.ready(FIRST, 105.0)
    t.finish(108.0)
    spans = {s.name: (s.start, s.end) for s in t.kept.spans if s.name != "fetch"}
    assert spans == {
        "look up": (101.0, 102.0),
        "queue": (103.0, 103.5),
        "encode item": (102.0, 105.0),
        "PD attempt": (103.0, 108.0),
    }
    encode, pd = t.kept.one("encode item"), t.kept.one("PD attempt")
    assert (encode.context, pd.context) == (remote(item), remote(attempt))
    assert encode.parent == pd.parent == remote(t.server.context)
    assert encode.kind is pd.kind is SpanKind.CLIENT
    assert t.kept.one("queue").parent == remote(attempt)
    assert encode.attributes["triptych.item.source"] == "encoded"
    assert encode.attributes["triptych.item.mm_hash"] == FIRST[:12]
    assert pd.attributes["triptych.request.attempt"] == 1
    assert pd.attributes["server.port"] == 5000
    assert pd.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert pd.events == ("accepted", "admitted")
    assert (encode.error, pd.error) == ("", "")


def test_a_lost_worker_is_a_failed_attempt_and_a_second_one() -> None:
    t = Traced()
    t.begin(101.0)
    t.accept(102.0)
    first = t.trace.attempt
    t.deliver(lost(1), 103.0)
    assert t.trace.attempt != first
    t.accept(104.0)
    t.finish(105.0)
    gone, done = t.attempts()
    assert (gone.error, gone.end, done.error) == ("worker_lost", 103.0, "")
    assert gone.attributes["error.type"] == "worker_lost"
    assert [s.attributes["triptych.request.attempt"] for s in (gone, done)] == [1, 2]


def test_a_hand_over_ends_one_attempt_well_and_begins_another_in_the_same_moment() -> None:
    t = Traced()
    t.begin(101.0)
    t.accept(102.0)
    t.deliver(WorkerEvent(attempt=1, tokens=pd_pb2.Tokens(offered=True)), 103.0)
    t.deliver(SuccessorSent(2), 103.5)
    t.address = "127.0.0.1:6000"
    t.deliver(SuccessorBegun(2, 0), 104.0)
    t.finish(105.0)
    before, after = t.attempts()
    assert (before.error, before.end, after.start, after.end) == ("", 104.0, 104.0, 105.0)
    assert after.attributes["server.port"] == 6000
    assert [s.attributes["triptych.request.attempt"] for s in (before, after)] == [1, 2]


def test_a_late_acceptance_is_not_the_next_attempts() -> None:
    t = Traced()
    t.begin(101.0)
    t.deliver(lost(1), 103.0)
    t.see(Accepted(1), 104.0)
    t.accept(105.0)
    t.finish(106.0)
    queue = t.kept.one("queue")
    assert (queue.start, queue.end) == (103.0, 105.0)


def test_a_lost_item_is_encoded_again_under_a_span_of_its_own() -> None:
    t = Traced(FIRST, SECOND)
    t.begin(101.0)
    t.look_up(102.0, FIRST, SECOND)
    t.accept(102.5)
    t.deliver(pd_missing(1, FIRST, ""), 103.0)
    t.ready(FIRST, 104.0)
    t.finish(105.0)
    again = t.kept.one("encode item")
    assert (again.start, again.end) == (103.0, 104.0)
    assert again.attributes["triptych.item.re_encode"] is True


def test_an_attempt_ends_when_no_encoder_worker_is_there() -> None:
    t = Traced(FIRST)
    t.begin(101.0)
    t.look_up(102.0)
    t.deliver(job_planned(FIRST, bare_plan(FIRST)), 103.0)
    t.accept(103.5)
    t.deliver(EncodersGone(), 104.0)
    assert [(s.error, s.end) for s in t.attempts()] == [("no_encoder_worker", 104.0)]
    t.deliver(EncodersBack(), 106.0)
    t.ready(FIRST, 107.0)
    t.finish(108.0)
    assert [s.error for s in t.attempts()] == ["no_encoder_worker", ""]


def test_a_failed_job_fails_what_is_open_by_its_code() -> None:
    t = Traced(FIRST, SECOND)
    t.begin(101.0)
    t.look_up(102.0)
    t.deliver(job_failed(FIRST, InvalidRequest("a secret file name", param="image")), 103.0)
    assert [s.error for s in t.kept.all("encode item")] == [InvalidRequest.code] * 2
    t.see(Ended(), 104.0)
    assert len(t.kept.all("encode item")) == 2
    assert "secret" not in repr(t.kept.spans)


def test_a_client_that_leaves_cancels_what_is_open() -> None:
    t = Traced(FIRST)
    t.begin(101.0)
    t.look_up(102.0)
    t.deliver(job_planned(FIRST, bare_plan(FIRST)), 103.0)
    t.deliver(ClientLeft(), 104.0)
    t.see(Ended(), 104.0)
    assert [s.error for s in t.kept.spans if s.kind is SpanKind.CLIENT] == ["cancelled"] * 2


def test_a_request_that_is_not_recorded_sends_its_unsampled_context_on() -> None:
    t = Traced(FIRST, ratio=0.1)
    t.begin(101.0)
    t.look_up(102.0)
    t.deliver(job_planned(FIRST, bare_plan(FIRST)), 103.0)
    assert t.trace.item(t.machine.items[FIRST]) == t.trace.attempt == t.server.context
    assert not t.trace.attempt.trace_flags.sampled
    t.accept(104.0)
    t.ready(FIRST, 105.0)
    t.finish(106.0)
    t.see(Ended(), 107.0)
    assert t.kept.spans == []


@pytest.mark.parametrize("choice", [0, 2])
def test_choices_are_told_apart(choice: int) -> None:
    tracer, kept = kept_tracer(clock=TickingClock())
    trace = RequestTrace(ServerSpan(tracer, None, "chat", {}), "r1", choice)
    fetched = Fetched({}, 0.0)
    for event in [fetched, *Lifecycle().deliver(fetched), Ended()]:
        trace.observe(event, 101.0, "", {})
    assert kept.one("PD attempt").attributes.get("triptych.request.choice", 0) == choice
