"""The recorder: every event reaches the views of its request, and nobody else's."""

from __future__ import annotations

import pytest

from support.data.items import make_plan
from support.tracing.spans import TickingClock, kept_tracer
from triptych.base.errors import RequestError
from triptych.base.metrics import ProxyMetrics
from triptych.base.tracing.server_span import ServerSpan
from triptych.base.types import SamplingParams
from triptych.proxy.admission import make_choices
from triptych.proxy.call.chat import ChatCall
from triptych.proxy.events import CallEnded, Ended, FirstToken, JobReady
from triptych.proxy.requests.instructions import LookUpItems, ResumeState, Submit
from triptych.proxy.requests.recorder import Event, Items, Recorder
from triptych.proxy.requests.request import Choices

RESUME = ResumeState((1,), (), (2,), 0)


class Watcher:
    """A view of every call's first choice, and the observer that hands it out."""

    def __init__(self) -> None:
        self.seen: list[tuple[Event, float, str]] = []
        self.ended: list[tuple[int, RequestError | None]] = []
        self.items: list[JobReady] = []

    def observe(self, event: Event, at: float, address: str, items: Items) -> None:
        self.seen.append((event, at, address))

    def opened(self, choices: Choices) -> Watcher:
        return self

    def closed(self, choices: Choices, failure: RequestError | None) -> None:
        self.ended.append((choices.status, failure))

    def encoded(self, end: JobReady) -> None:
        self.items.append(end)


class Recorded:
    """One call of two choices, and its recorder."""

    def __init__(self, *, watched: bool = True, ratio: float | None = None) -> None:
        self.watcher, self.clock, self.metrics = Watcher(), TickingClock(), ProxyMetrics()
        call = ChatCall("mine", "m", (), SamplingParams(), 1.0, n=2)
        self.choices = make_choices(call, 1, 0.0)
        self.first, self.second = self.choices.requests
        observer = self.watcher if watched else None
        self.recorder = Recorder(self.metrics, self.clock, lambda name: name, observer)
        tracer, self.kept = kept_tracer(ratio or 1.0, clock=self.clock)
        self.recorder.open(self.choices, None if ratio is None else ServerSpan(tracer, None, "chat", {}))

    def events(self) -> list[Event]:
        return [event for event, _, _ in self.watcher.seen]


def attempt(number: int, resume: ResumeState | None = None) -> Submit:
    return Submit(number, resume, frozenset())


def test_events_reach_the_first_choices_view_in_order_and_with_their_moments() -> None:
    r = Recorded()
    r.recorder.record(r.first, attempt(1))
    r.clock.now = 101.0
    r.recorder.record(r.second, attempt(1))
    r.recorder.record(r.first, FirstToken())
    assert r.watcher.seen == [(attempt(1), 100.0, ""), (FirstToken(), 101.0, "")]


def test_a_call_ends_once_after_all_its_choices() -> None:
    r = Recorded(ratio=1.0)
    r.second.first_token, r.first.first_token = 2.0, 3.0
    r.recorder.close(r.choices, None)
    assert r.events() == [Ended(), CallEnded(499, 0, 0, 2.0)]
    assert r.watcher.ended == [(499, None)]


def test_a_ready_item_is_told_once_for_its_job() -> None:
    r = Recorded()
    end = JobReady(make_plan(rows=4, width=8), False, 2.0, 3.0)
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
        r.recorder.record(request, attempt(1))
    r.recorder.close(r.choices, None)
    choices = [span.attributes.get("triptych.request.choice") for span in r.kept.all("PD attempt")]
    assert choices == [None, 1]


def test_resumes_and_resubmissions_are_counted_apart_whether_anybody_watches_or_not() -> None:
    r = Recorded(watched=False)
    for order in (attempt(1), attempt(2), attempt(3, RESUME), attempt(4, RESUME)):
        r.recorder.record(r.first, order)
    (family,) = r.metrics.resumes.collect()
    counts = {
        sample.labels["reason"]: sample.value for sample in family.samples if sample.name.endswith("_total")
    }
    assert counts == {"resume": 2, "resubmit": 1}
