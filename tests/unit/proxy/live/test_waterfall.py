"""The waterfall of a call: its spans add up, and say where each item came from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from support.data.items import make_plan
from support.data.job_events import job_planned, job_ready, job_waits
from support.data.pd_events import pd_admitted, pd_finished, pd_loaded, pd_missing
from support.fakes.live_view import call_record
from triptych.proxy.events import (
    Accepted,
    Fetched,
    FirstToken,
    JobEvent,
    LookedUp,
    WorkerEvent,
)
from triptych.proxy.live.objects import StageSpan, Waterfall
from triptych.proxy.live.timeline import TIMED_ITEMS, RequestTimeline
from triptych.proxy.live.waterfall import waterfall
from triptych.proxy.requests.instructions import EndAttempt, StartJobs, Submit, TakeOver
from triptych.proxy.requests.recorder import Event

START, PD, PD2, ENCODER = 100.0, "pd:1", "pd:2", "encoder:1"
PLAN = make_plan(rows=4, width=8)
IDS = (7,)


class Script:
    """The events of a request, when they come, and its timeline."""

    def __init__(self) -> None:
        self.timeline = RequestTimeline()

    def at(self, seconds: float, *events: Event, pd: str = PD) -> None:
        for event in events:
            self.timeline.observe(event, START + seconds, pd, {})

    def shown(self, end: float | None, now: float = 0.0) -> Waterfall:
        record = call_record(START, None if end is None else START + end, self.timeline)
        found = waterfall(record, START + now)
        assert_tiled(found.spans, now if end is None else end)
        return found


def assert_tiled(spans: Sequence[StageSpan], end: float) -> None:
    """Spans of the request itself follow each other from 0 to its end; all others lie inside."""
    tiles = [span for span in spans if span.item is None]
    assert tiles[0].start == 0.0
    assert tiles[-1].end == pytest.approx(end, abs=1e-6)
    for before, after in itertools.pairwise(tiles):
        assert before.end == after.start
    assert sum(tile.end - tile.start for tile in tiles) == pytest.approx(end)
    assert all(0.0 <= span.start <= span.end <= end + 1e-6 for span in spans)


def tiles(found: Waterfall) -> list[tuple[str, str, float, float]]:
    """The stages of the request; a wait for an item is one, whatever stage that is in."""
    merged: list[tuple[str, str, float, float]] = []
    before = ""
    for span in (span for span in found.spans if span.item is None):
        if merged and merged[-1][:2] == (span.name, span.where) and (span.awaits or before):
            merged[-1] = (*merged[-1][:3], span.end)
        else:
            merged.append((span.name, span.where, span.start, span.end))
        before = span.awaits
    return merged


def of_item(found: Waterfall, item: int = 0) -> list[tuple[str, str, float, float]]:
    return [(s.name, s.where, s.start, s.end) for s in found.spans if s.item == item]


def notes(found: Waterfall, item: int | None = 0) -> str:
    return "; ".join(s.note for s in found.spans if s.item == item)


def fetched(*items: str, seconds: float) -> Fetched:
    return Fetched(dict.fromkeys(items, ""), seconds)


def ready(item: str, preprocess: float, encode: float, save: float, address: str = ENCODER) -> JobEvent:
    return job_ready(item, PLAN, preprocess=preprocess, encode=encode, save=save, address=address)


def finished(attempt: int, prefill: float, decode: float) -> WorkerEvent:
    return pd_finished(attempt, 7, 3, prefill=prefill, decode=decode)


def planned(script: Script, *items: str) -> None:
    """Fetched by 1 s, looked up by 2 s; then each item is wanted."""
    script.at(1.0, fetched(*items, seconds=0.5))
    script.at(2.0, LookedUp({}), *map(job_waits, items))


def answered(script: Script, attempt: int = 1, pd: str = PD, since: float = 0.0) -> None:
    """Submitted at 4 s, with a PD worker by 5 s, admitted at 6 s."""
    script.at(4.0 + since, Submit(attempt))
    script.at(5.0 + since, Accepted(attempt), pd=pd)
    script.at(6.0 + since, pd_admitted(attempt, IDS, ()), pd=pd)


def test_every_stage_of_a_request_with_an_item_has_its_span() -> None:
    script = Script()
    planned(script, "a")
    script.at(4.0, job_planned("a", PLAN))
    answered(script)
    script.at(10.0, ready("a", 1.5, 2.0, 0.5))
    script.at(11.0, pd_loaded(1, "a", 0.75))
    script.at(13.0, FirstToken())
    script.at(15.0, finished(1, 1.5, 2.0))
    script.at(15.0, EndAttempt(cancel=False))
    found = script.shown(15.5)
    assert tiles(found) == [
        ("wait", "proxy", 0.0, 0.5),
        ("fetch", "proxy", 0.5, 1.0),
        ("wait", "store", 1.0, 2.0),
        ("wait", "proxy", 2.0, 4.0),
        ("queue", "proxy", 4.0, 5.0),
        ("queue", PD, 5.0, 6.0),
        ("wait", PD, 6.0, 11.0),
        ("queue", PD, 11.0, 11.5),
        ("prefill", PD, 11.5, 13.0),
        ("decode", PD, 13.0, 15.0),
        ("wait", "proxy", 15.0, 15.5),
    ]
    assert of_item(found) == [
        ("queue", "proxy", 2.0, 2.5),
        ("preprocess", ENCODER, 2.5, 4.0),
        ("queue", ENCODER, 4.0, 7.5),
        ("encode", ENCODER, 7.5, 9.5),
        ("save", "store", 9.5, 10.0),
        ("load", PD, 10.25, 11.0),
    ]
    assert (found.id, found.seconds, found.status, found.attempts, found.items) == ("mine", 15.5, 200, 1, 1)


def test_an_embedding_that_the_store_has_lost_is_encoded_again() -> None:
    script = Script()
    script.at(1.0, fetched("a", seconds=0.0))
    script.at(2.0, LookedUp({"a": PLAN}))
    answered(script)
    script.at(7.0, pd_missing(1, "a"))
    script.at(7.0, StartJobs(("a",), re_encode=True))
    script.at(9.0, ready("a", 0.1, 0.5, 0.1))
    script.at(9.5, pd_loaded(1, "a", 0.2))
    found = script.shown(10.0)
    assert "not found" in notes(found) and "the store had lost it" in notes(found)
    assert of_item(found)[-1] == ("load", PD, 9.3, 9.5)


def test_a_second_attempt_is_seen_and_late_moments_of_the_first_are_not() -> None:
    script = Script()
    script.at(1.0, fetched(seconds=0.0))
    answered(script)
    script.at(8.0, FirstToken())
    script.at(9.0, EndAttempt(cancel=False))
    answered(script, 2, PD2, since=6.0)
    script.at(13.0, pd_admitted(1, IDS, ()))
    script.at(20.0, finished(2, 2.0, 3.0))
    found = script.shown(20.0)
    assert tiles(found)[-6:] == [
        ("wait", "proxy", 9.0, 10.0),
        ("queue", "proxy", 10.0, 11.0),
        ("queue", PD2, 11.0, 12.0),
        ("queue", PD2, 12.0, 15.0),
        ("prefill", PD2, 15.0, 17.0),
        ("decode", PD2, 17.0, 20.0),
    ]
    assert ("decode", PD, 8.0, 9.0) in tiles(found)
    assert {span.attempt for span in found.spans} == {0, 1, 2}
    assert found.attempts == 2


def test_a_request_that_ends_before_its_look_up_adds_up() -> None:
    script = Script()
    script.at(1.0, fetched("a", seconds=5.0))
    assert tiles(script.shown(1.5))[0] == ("fetch", "proxy", 0.0, 1.0)


@pytest.mark.parametrize("prefill", [0.0, 0.5, 3.0, 1e9])
@pytest.mark.parametrize("decode", [0.0, 2.0, 1e9])
def test_it_adds_up_whatever_a_worker_reports(prefill: float, decode: float) -> None:
    script = Script()
    planned(script, "a")
    answered(script)
    script.at(7.0, ready("a", prefill, decode, prefill))
    script.at(8.0, pd_loaded(1, "a", decode))
    script.at(9.0, FirstToken())
    script.at(10.0, finished(1, prefill, decode))
    script.shown(10.0)
    script.shown(9.5)


def test_items_beyond_the_first_are_one_span() -> None:
    script = Script()
    names = [f"item {index}" for index in range(TIMED_ITEMS + 3)]
    planned(script, *names)
    for name in names:
        script.at(5.0, ready(name, 0.1, 0.1, 0.1))
    found = script.shown(6.0)
    summed = of_item(found, TIMED_ITEMS)
    assert summed == [("encode", "", 2.0, 5.0)]
    assert "3 further items" in notes(found, TIMED_ITEMS)
    assert max(span.item or 0 for span in found.spans) == TIMED_ITEMS


def test_a_wait_for_items_says_what_the_last_of_them_waits_for() -> None:
    script = Script()
    planned(script, "a", "b")
    script.at(4.0, job_planned("a", PLAN), job_planned("b", PLAN))
    answered(script)
    script.at(7.0, ready("a", 1.0, 0.5, 0.5))
    script.at(8.0, pd_loaded(1, "a", 0.1))
    script.at(10.0, ready("b", 1.5, 2.0, 0.5))
    script.at(11.0, pd_loaded(1, "b", 0.75))
    waits = [(s.awaits, s.start, s.end, s.note) for s in script.shown(12.0).spans if s.name == "wait"]
    assert waits[2:] == [
        ("queue", 2.0, 3.0, "for item 1: queue"),
        ("preprocess", 3.0, 4.0, "for item 1: preprocess"),
        ("queue", 6.0, 7.5, "for item 2: queue"),
        ("encode", 7.5, 9.5, "for item 2: encode"),
        ("save", 9.5, 10.0, "for item 2: save"),
        ("", 10.0, 10.25, "for embeddings"),
        ("load", 10.25, 11.0, "for item 2: load"),
    ]


def test_a_segment_of_a_video_has_its_title() -> None:
    script = Script()
    titles = ("", "video 1, segment 2 (15–30 s)")
    script.at(1.0, Fetched({"a": "", "b": ""}, 0.5, titles))
    script.at(2.0, LookedUp({}), job_waits("a"), job_waits("b"))
    answered(script)
    script.at(7.0, ready("a", 1.0, 0.5, 0.5), pd_loaded(1, "a", 0.1))
    script.at(10.0, ready("b", 1.5, 2.0, 0.5))
    found = script.shown(12.0)
    assert found.titles == list(titles)
    assert "for video 1, segment 2 (15–30 s): encode" in notes(found, None)


def test_a_request_that_is_handed_over_decodes_at_both_workers_without_a_gap() -> None:
    script = Script()
    script.at(1.0, fetched(seconds=0.0))
    answered(script)
    script.at(8.0, FirstToken())
    script.at(9.0, TakeOver(2), pd=PD2)
    script.at(12.0, finished(2, 0.5, 3.5), pd=PD2)
    script.at(12.0, EndAttempt(cancel=False), pd=PD2)
    found = script.shown(12.0)
    assert tiles(found)[-3:] == [
        ("prefill", PD, 6.0, 8.0),
        ("decode", PD, 8.0, 9.0),
        ("decode", PD2, 9.0, 12.0),
    ]
    assert "taken over" in notes(found, None)
    assert found.attempts == 2
