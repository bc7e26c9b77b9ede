"""The timeline of a request: what it notes of each event."""

from __future__ import annotations

from support.data.items import make_plan
from triptych.base.types import PDTimings, Usage
from triptych.proxy.events import Fetched, Finished, ItemReady, JobReady, LoadReported
from triptych.proxy.requests.instructions import Submit
from triptych.proxy.requests.views import Event, RequestTimeline

PLAN = make_plan(rows=4, width=8)


def observed(*events: Event) -> RequestTimeline:
    timeline = RequestTimeline()
    for event in events:
        timeline.observe(event, 5.0, "pd:1", {})
    return timeline


def ready(*, stored: bool) -> ItemReady:
    end = JobReady(PLAN, stored, 2.0, 3.0, preprocess_seconds=1.0, address="encoder:1")
    return ItemReady("a", end)


def test_an_item_is_named_by_its_place_among_the_requests_items() -> None:
    fetched, loaded = Fetched({"a": "", "b": ""}, 0.5), LoadReported(1, "b", 0.0)
    timeline = observed(fetched, Submit(1, None, frozenset()), loaded)
    assert timeline.items == 2
    assert [moment.item for moment in timeline.moments] == [None, None, 1]


def test_a_ready_item_has_its_worker_its_seconds_and_whether_the_tower_ran() -> None:
    timeline = observed(Fetched({"a": ""}, 0.5), ready(stored=False), ready(stored=True))
    ran, found = timeline.moments[1:]
    assert (ran.kind, ran.where, ran.spent, ran.note) == (ItemReady, "encoder:1", (1.0, 2.0, 3.0), "")
    assert found.note == "stored"


def test_the_end_has_the_cached_tokens_and_the_pd_workers_seconds() -> None:
    timeline = observed(
        Submit(2, None, frozenset()),
        Finished(1, "stop", Usage(9, 1), PDTimings(prefill=7.0)),
        Finished(2, "stop", Usage(9, 1, cached_tokens=6), PDTimings(prefill=0.25, decode=0.75)),
    )
    assert timeline.cached_tokens == 6
    (end,) = (moment for moment in timeline.moments if moment.kind is Finished)
    assert (end.attempt, end.spent) == (2, (0.25, 0.75))
