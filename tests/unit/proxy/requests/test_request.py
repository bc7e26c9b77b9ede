"""Choices of a call, their time line, and items that are held or wait for the store."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from support.data.items import bare_plan, make_plan
from support.data.job_events import job_failed, job_planned, job_ready, job_waits
from support.data.pd_events import pd_admitted, pd_finished, pd_loaded
from support.waiting import until
from triptych.base.delta import Delta
from triptych.base.errors import InvalidRequest, RequestError
from triptych.base.metrics import ProxyMetrics
from triptych.base.types import FinishReason, ItemPlan, SamplingParams, Usage
from triptych.protos.pd_pb2 import Admitted
from triptych.proxy.admission import WHOLE_BATCH, make_choices
from triptych.proxy.call.chat import ChatCall, Done, Timings
from triptych.proxy.events import (
    Accepted,
    ClientLeft,
    Fetched,
    JobEvent,
    LookedUp,
    RequestEvent,
    lost,
)
from triptych.proxy.live.timeline import RequestTimeline
from triptych.proxy.media.source import ItemMedia
from triptych.proxy.quotas.quota import Quota, QuotaSpec
from triptych.proxy.requests.instructions import Submit, TellJobs
from triptych.proxy.requests.item_supply import StoreWait, held_keys
from triptych.proxy.requests.lifecycle import Lifecycle
from triptych.proxy.requests.output_queue import STEP, OutputQueue, ReplyMemory
from triptych.proxy.requests.recorder import Event
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
    second.emit(Admitted(prompt_token_ids=(1, 2)))
    first.emit(Admitted(prompt_token_ids=(1, 2)))
    second.output.put(Delta("b", [4]))
    first.output.put(Delta("a", [3]))
    assert await choices.output.drain() == [
        Admitted(prompt_token_ids=(1, 2)),
        Delta("b", [4], (), 1),
        Delta("a", [3], (), 0),
    ]


async def test_the_last_choice_to_end_has_the_usage_of_all() -> None:
    choices = made(2)
    first, second = choices.requests
    second.emit(done(10, 5, 8))
    first.emit(done(10, 2, 0))
    early, late = await choices.output.drain()
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


def memory_of_replies(*, whole: bool = False) -> ReplyMemory:
    spec = QuotaSpec("replies", 64 * STEP, "bytes", "memory for replies", "", "503", share=1.0, largest=STEP)
    return ReplyMemory(Quota(spec), "", whole=whole)


async def test_a_reader_that_is_back_gives_back_what_its_stream_held() -> None:
    memory = memory_of_replies()
    queue = OutputQueue(memory=memory)
    for text in ["x" * STEP] * 30 + [""] * memory.unmeasured:
        queue.put(Delta(text, [1]))
    assert memory.hold.amount > 30 * STEP
    await queue.drain()
    queue.put(Delta("a", [1]))
    await queue.drain()
    assert memory.hold.amount == STEP


PLAN = make_plan(rows=4, width=8)


def observed(*events: Event) -> RequestTimeline:
    timeline = RequestTimeline()
    for event in events:
        timeline.observe(event, 5.0, "pd:1", {})
    return timeline


def ready(*, stored: bool) -> JobEvent:
    return job_ready(
        "a", PLAN, already_stored=stored, preprocess=1.0, encode=2.0, save=3.0, address="encoder:1"
    )


def test_an_item_is_named_by_its_place_among_the_requests_items() -> None:
    fetched, loaded = Fetched({"a": "", "b": ""}, 0.5), pd_loaded(1, "b", 0.0)
    timeline = observed(fetched, Submit(1), loaded)
    assert timeline.items == 2
    assert [moment.item for moment in timeline.moments] == [None, None, 1]


def test_a_ready_item_has_its_worker_its_seconds_and_whether_the_tower_ran() -> None:
    timeline = observed(Fetched({"a": ""}, 0.5), ready(stored=False), ready(stored=True))
    ran, found = timeline.moments[1:]
    assert (ran.kind, ran.where, ran.spent, ran.note) == ("ready", "encoder:1", (1.0, 2.0, 3.0), "")
    assert found.note == "stored"


def test_a_try_that_has_failed_is_shown_with_its_reason_and_the_jobs_end_is_not() -> None:
    retried = job_failed("a", InvalidRequest("x" * 500), retryable=True, address="encoder:1")
    timeline = observed(Fetched({"a": ""}, 0.5), retried, job_failed("a", InvalidRequest("no")))
    (moment,) = timeline.moments[1:]
    assert (moment.kind, moment.item, moment.where, moment.note) == ("failed", 0, "encoder:1", "x" * 120)


def test_a_job_shows_whose_it_is_and_where_its_item_was_planned() -> None:
    planned = job_planned("a", PLAN, "encoder:1")
    waits, shown = observed(Fetched({"a": ""}, 0.5), job_waits("a", "joined"), planned).moments[1:]
    assert (waits.kind, waits.note, waits.where) == ("waits", "joined", "")
    assert (shown.kind, shown.where) == ("planned", "encoder:1")


def test_of_what_the_jobs_are_told_only_an_item_that_its_worker_held_is_shown() -> None:
    loaded = pd_loaded(1, "a", 0.0)
    told = (TellJobs(pd_admitted(1, (7,), ())), TellJobs(loaded), TellJobs(loaded, held=True))
    timeline = observed(Fetched({"a": ""}, 0.5), *told)
    (moment,) = timeline.moments[1:]
    assert (moment.kind, moment.item, timeline.loaded) == (TellJobs, 0, 1)


def test_the_end_has_the_cached_tokens_and_the_pd_workers_seconds() -> None:
    timeline = observed(
        Submit(2),
        pd_finished(1, 9, 1, prefill=7.0),
        pd_finished(2, 9, 1, 6, prefill=0.25, decode=0.75),
    )
    assert timeline.cached_tokens == 6
    (end,) = (moment for moment in timeline.moments if moment.kind == "finished")
    assert (end.attempt, end.spent) == (2, (0.25, 0.75))


def item(key: str, prefix: int) -> SplitItem:
    return SplitItem(key, cast(ItemMedia, None), "", {}, prefix=prefix)


@pytest.mark.parametrize(
    ("items", "missing", "known", "held"),
    [
        ([("a", 0), ("b", 2), ("c", 4)], ["a", "b", "c"], 3, {"a", "b"}),
        ([("a", 0)], ["a"], 0, set()),
        ([("a", 0)], [], 1, set()),
        ([("a", 0), ("a", 2)], ["a"], 2, set()),
    ],
    ids=["of known prefixes", "none is known", "stored", "again after the known prefixes"],
)
def test_items_of_known_prefixes_alone_may_be_held(items, missing, known, held):
    assert held_keys([item(*each) for each in items], missing, known) == held


STORED = bare_plan("a")


def looked_up(*stored: ItemPlan) -> Lifecycle:
    machine = Lifecycle()
    machine.deliver(Fetched({"a": "field"}, 0.0))
    machine.deliver(LookedUp({plan.mm_hash: plan for plan in stored}))
    return machine


def test_an_item_without_an_embedding_waits_for_encoders_and_one_that_is_stored_for_pd_workers() -> None:
    assert looked_up().waits_for("encoder")
    assert not looked_up().waits_for("pd")
    stored = looked_up(STORED)
    assert (stored.waits_for("encoder"), stored.waits_for("pd")) == (False, True)
    stored.deliver(Accepted(1))
    stored.deliver(pd_admitted(1, (7,), [(0, 1)]))
    stored.deliver(pd_loaded(1, "a"))
    assert not stored.waits_for("pd")


def test_an_attempt_elsewhere_has_loaded_nothing_yet() -> None:
    machine = looked_up(STORED)
    machine.deliver(Accepted(1))
    machine.deliver(pd_loaded(1, "a"))
    machine.deliver(lost(1))
    assert machine.waits_for("pd")


def test_text_and_what_has_ended_wait_for_no_store() -> None:
    text = Lifecycle()
    text.deliver(Fetched({}, 0.0))
    assert not text.waits_for("encoder") and not text.waits_for("pd")
    gone = looked_up()
    gone.deliver(ClientLeft())
    assert not gone.waits_for("encoder")


def test_the_time_to_first_token_is_of_all_that_were_answered_and_of_nothing_else() -> None:
    """As the alerts divide: a vector has no token, and who leaves or fails later counts as neither."""
    metrics = ProxyMetrics()
    for status, token in ((200, None), (200, 0.5), (499, 0.1), (500, 0.1)):
        choices = made(1)
        choices.status, choices.first.first_token = status, token
        choices.report(metrics, 2.0, "m")
    name = "triptych_time_to_first_token_seconds"
    assert metrics.registry.get_sample_value(f"{name}_count") == 2
    assert metrics.registry.get_sample_value(f"{name}_sum") == 2.5


class Proxy:
    """Requests that wait with a limit of no time, and the errors that they get."""

    def __init__(self) -> None:
        self.lost = {"encoder"}
        self.errors: dict[str, RequestError] = {}
        self.requests: dict[str, Any] = {}
        pool: Any = SimpleNamespace(store_lost=lambda pool: pool in self.lost)
        events: Any = SimpleNamespace(deliver=self._failed)
        self.limit = StoreWait(pool, self.requests, events, 0.0)

    def _failed(self, name: str, event: RequestEvent) -> None:
        self.errors[name] = event.error

    def add(self, name: str, machine: Lifecycle, first_token: float | None = None) -> None:
        self.requests[name] = SimpleNamespace(
            request_id=name,
            lifecycle=machine,
            first_token=first_token,
            split=SimpleNamespace(items=("a",)),
        )
        self.limit.watch(self.requests[name])


@pytest.mark.parametrize("before", [True, False])
async def test_who_waits_with_nothing_streamed_gets_503_with_retry_after(before: bool) -> None:
    proxy = Proxy()
    if before:  # the loss comes before the request
        proxy.limit.pool_changed()
    proxy.add("streams", looked_up(), first_token=1.0)
    proxy.add("waits", looked_up())
    proxy.limit.pool_changed()
    await until(lambda: proxy.errors)
    assert list(proxy.errors) == ["waits"]
    error = proxy.errors["waits"]
    assert error.status == 503 and error.retry_after
    assert "encoder worker reaches the embedding store" in error.message


async def test_a_request_whose_media_are_still_fetched_keeps_no_other_from_its_limit() -> None:
    proxy = Proxy()
    (fetches,) = made(1).requests
    fetches.binding = cast(Any, object())
    proxy.requests["fetches"] = fetches
    proxy.add("waits", looked_up())
    proxy.limit.pool_changed()
    await until(lambda: proxy.errors)
    assert list(proxy.errors) == ["waits"]


async def test_a_store_that_is_back_in_time_costs_no_request() -> None:
    proxy = Proxy()
    proxy.limit.pool_changed()
    proxy.add("waits", looked_up())
    proxy.lost.clear()
    proxy.limit.pool_changed()
    proxy.lost.add("encoder")
    proxy.add("later", looked_up())
    proxy.limit.pool_changed()
    del proxy.requests["waits"]
    await until(lambda: proxy.errors)
    assert list(proxy.errors) == ["later"]
