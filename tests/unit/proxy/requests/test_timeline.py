"""The timeline of a request: what it notes of each event, and that an unwatched one notes nothing."""

from __future__ import annotations

from support.data.items import make_plan
from triptych.proxy.ports import JobReady
from triptych.proxy.requests.timeline import UNWATCHED, Mark, RequestTimeline
from triptych.types import PDTimings, Usage

PLAN = make_plan(rows=4, width=8)


def ready(*, stored: bool) -> JobReady:
    return JobReady(PLAN, stored, 2.0, 3.0, preprocess_seconds=1.0, address="encoder:1")


def test_an_item_that_two_parts_name_is_one_item():
    timeline = RequestTimeline(lambda: 5.0)
    timeline.fetched(["a", "b", "a"], 0.5)
    assert timeline.items == 2
    timeline.mark(Mark.LOADED, "b")
    assert [moment.item for moment in timeline.moments] == [None, 1]


def test_a_ready_item_has_its_worker_its_seconds_and_whether_the_tower_ran():
    timeline = RequestTimeline(lambda: 5.0)
    timeline.fetched(["a"], 0.5)
    timeline.ready("a", ready(stored=False))
    timeline.ready("a", ready(stored=True))
    ran, found = timeline.moments[1:]
    assert (ran.mark, ran.where, ran.spent, ran.note) == (Mark.READY, "encoder:1", (1.0, 2.0, 3.0), "")
    assert found.note == "stored"


def test_the_end_has_the_cached_tokens_and_the_pd_workers_seconds():
    timeline = RequestTimeline(lambda: 5.0)
    timeline.submitted(2)
    timeline.finished(1, Usage(9, 1), PDTimings(prefill=7.0))
    timeline.finished(2, Usage(9, 1, cached_tokens=6), PDTimings(prefill=0.25, decode=0.75))
    assert timeline.cached_tokens == 6
    (end,) = (moment for moment in timeline.moments if moment.mark is Mark.FINISHED)
    assert (end.attempt, end.spent) == (2, (0.25, 0.75))


def test_an_unwatched_request_leaves_nothing_in_the_timeline_that_all_of_them_share():
    UNWATCHED.fetched(["a"], 0.5)
    UNWATCHED.submitted(3)
    UNWATCHED.ready("a", ready(stored=False))
    UNWATCHED.finished(3, Usage(9, 1, cached_tokens=6), PDTimings())
    UNWATCHED.mark(Mark.LOADED, "a")
    assert (UNWATCHED.moments, UNWATCHED.items, UNWATCHED.attempt, UNWATCHED.cached_tokens) == ([], 0, 0, 0)
    assert (UNWATCHED.loaded, UNWATCHED.rest) == (0, None)
