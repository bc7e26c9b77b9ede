"""A request of several choices, and its timeline."""

from __future__ import annotations

import asyncio
import re
from typing import cast

import pytest

from support.data.items import make_plan
from triptych.base.errors import InvalidRequest
from triptych.base.types import FinishReason, PDTimings, SamplingParams, Usage
from triptych.proxy.admission import WHOLE_BATCH, make_choices
from triptych.proxy.call.chat import ChatCall, Delta, Done, Started, Timings
from triptych.proxy.events import Fetched, Finished, ItemReady, JobReady, LoadReported
from triptych.proxy.media.source import ItemMedia
from triptych.proxy.requests.instructions import Submit
from triptych.proxy.requests.item_supply import held_keys
from triptych.proxy.requests.recorder import Event, RequestTimeline
from triptych.proxy.requests.request import Choices
from triptych.proxy.splitter import SplitItem


def made(n: int) -> Choices:
    return make_choices(ChatCall("r", "m", (), SamplingParams(seed=7), 1.0, n=n), 1, 0.0)


def whole() -> Choices:
    call = ChatCall("r", "m", (), SamplingParams(seed=7), 1.0, whole=True)
    return make_choices(call, 1, 0.0)


def done(prompt: int, completion: int, cached: int) -> Done:
    return Done(FinishReason.STOP, Usage(prompt, completion, cached), Timings())


def test_a_single_choice_is_the_call_itself() -> None:
    choices = made(1)
    (request,) = choices.requests
    assert request.call.label == "r"
    assert request.output is choices.output


def test_choices_differ_in_id_and_index_and_share_label_and_seed() -> None:
    requests = made(3).requests
    calls = [request.call for request in requests]
    assert len({request.request_id for request in requests}) == 3
    assert [call.label for call in calls] == ["r", "r", "r"]
    assert [(call.sampling.seed, call.sampling.choice) for call in calls] == [(7, 0), (7, 1), (7, 2)]
    assert calls[1].media is calls[0].media


def test_ids_say_nothing_of_the_label_and_are_never_drawn_twice() -> None:
    ids = [request.request_id for _ in range(500) for request in made(2).requests]
    assert len(set(ids)) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", drawn) for drawn in ids)


async def test_outputs_carry_their_choice_and_the_prompt_is_reported_once() -> None:
    choices = made(2)
    first, second = choices.requests
    second.emit(Started((1, 2)))
    first.emit(Started((1, 2)))
    second.output.put(Delta("b", [4]))
    first.output.put(Delta("a", [3]))
    assert await choices.output.drain() == [Started((1, 2)), Delta("b", [4], (), 1), Delta("a", [3], (), 0)]


async def test_the_last_choice_to_end_has_the_usage_of_all() -> None:
    choices = made(2)
    first, second = choices.requests
    second.emit(done(10, 5, 8))
    first.emit(done(10, 2, 0))
    early, late = await choices.output.drain()
    assert isinstance(early, Done)
    assert isinstance(late, Done)
    assert (early.choice, early.final) == (1, False)
    assert (late.choice, late.final, late.usage) == (0, True, Usage(10, 7, 0))


async def test_the_failure_of_one_choice_is_the_requests() -> None:
    choices = made(2)
    error = InvalidRequest("no")
    choices.requests[1].output.fail(error)
    with pytest.raises(InvalidRequest) as caught:
        await choices.output.drain()
    assert caught.value is error


async def test_a_reply_in_one_piece_is_woken_by_a_batch_or_the_end_and_not_by_each_token() -> None:
    output = whole().output
    reader = asyncio.create_task(output.drain())
    await asyncio.sleep(0)
    for position in range(WHOLE_BATCH - 1):
        output.put(Delta("a", [position]))
    await asyncio.sleep(0)
    assert not reader.done()
    output.put(Delta("b", [9]))
    assert len(await reader) == WHOLE_BATCH
    reader = asyncio.create_task(output.drain())
    await asyncio.sleep(0)
    end = done(1, 65, 0)
    output.put(end)
    assert await reader == [end]


async def test_a_failure_wakes_a_reply_in_one_piece_behind_its_tokens() -> None:
    output = whole().output
    reader = asyncio.create_task(output.drain())
    await asyncio.sleep(0)
    output.put(Delta("a", [1]))
    output.fail(InvalidRequest("no"))
    assert await reader == [Delta("a", [1])]
    with pytest.raises(InvalidRequest):
        await output.drain()


async def test_a_streamed_replys_reader_is_woken_by_its_first_token() -> None:
    output = made(1).output
    reader = asyncio.create_task(output.drain())
    await asyncio.sleep(0)
    output.put(Delta("a", [1]))
    assert await reader == [Delta("a", [1])]


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


def item(key: str, prefix: int) -> SplitItem:
    return SplitItem(key, cast(ItemMedia, None), "", {}, prefix=prefix)


def test_items_of_known_prefixes_may_be_held_and_later_ones_are_not() -> None:
    items = [item("a", 0), item("b", 2), item("c", 4)]
    assert held_keys(items, ["a", "b", "c"], 3) == {"a", "b"}


def test_nothing_is_held_where_no_prefix_is_known() -> None:
    assert held_keys([item("a", 0)], ["a"], 0) == set()


def test_an_item_that_is_stored_is_not_asked_for() -> None:
    assert held_keys([item("a", 0)], [], 1) == set()


def test_a_picture_that_comes_again_after_the_known_prefixes_has_to_be_encoded() -> None:
    assert held_keys([item("a", 0), item("a", 2)], ["a"], 2) == set()
