"""What of a PD worker's messages a request's timeline keeps."""

from __future__ import annotations

import pytest

from support.data.items import bare_plan
from support.data.pd_events import pd_admitted, pd_finished, pd_loaded
from support.fakes.live_view import call_record
from triptych.proxy.events import Accepted, Fetched
from triptych.proxy.live.timeline import RequestTimeline
from triptych.proxy.requests.instructions import Submit, TellJobs
from triptych.proxy.requests.request_item import RequestItem


def under_way(item: RequestItem) -> tuple[RequestTimeline, list[tuple[str, int]]]:
    """The timeline of a request with the item, at its PD worker, and the loads that it counts."""
    loads: list[tuple[str, int]] = []
    timeline = RequestTimeline(lambda way, nbytes: loads.append((way, nbytes)))
    for event in (Fetched({"a": ""}, 0.5), Submit(1)):
        timeline.observe(event, 1.0, "", {"a": item})
    return timeline, loads


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_an_end_without_an_answer_is_not_shown_as_the_requests(reason: str) -> None:
    timeline, _ = under_way(RequestItem("a", ""))
    timeline.observe(pd_finished(1, 9, 1, 6, reason=reason, prefill=1.0), 2.0, "pd:1", {})
    assert [moment.kind for moment in timeline.moments] == [Fetched, Submit]
    assert timeline.cached_tokens == 0


def test_an_item_expected_at_its_worker_is_shown_as_held_and_not_as_loaded() -> None:
    item = RequestItem("a", "")
    item.look_up(None, bare_plan("a"), ("", 0))
    timeline, loads = under_way(item)
    held = pd_loaded(1, "a", 0.5, "shm")
    for event in (held, TellJobs(held, held=True)):
        timeline.observe(event, 2.0, "pd:1", {"a": item})
    assert [moment.kind for moment in timeline.moments[2:]] == [TellJobs]
    assert (timeline.loaded, loads) == (1, [])


@pytest.mark.parametrize(
    ("seconds", "path", "counted"), [(0.0, "", []), (0.5, "", ["store"]), (0.5, "shm", ["shm"])]
)
def test_what_was_resident_counts_as_no_transfer(seconds: float, path: str, counted: list[str]) -> None:
    item = RequestItem("a", "")
    item.look_up(bare_plan("a"), None, ("", 0))
    timeline, loads = under_way(item)
    timeline.observe(pd_loaded(1, "a", seconds, path), 2.0, "pd:1", {"a": item})
    assert loads == [(way, bare_plan("a").nbytes) for way in counted]
    assert timeline.loaded == 1


@pytest.mark.parametrize("event", [Accepted(1), pd_admitted(1, (7,))], ids=["accepted", "admitted"])
def test_the_worker_that_took_a_request_is_that_of_either_event(event: object) -> None:
    timeline, _ = under_way(RequestItem("a", ""))
    timeline.observe(event, 2.0, "pd:1", {})  # type: ignore[arg-type]
    assert call_record(1.0, None, timeline).pd_address == "pd:1"
