"""What is known of items: plans seen lately, what landed during a look-up, published bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from support.data.items import bare_plan
from support.data.job_events import job_ready
from triptych.protos import encoder_pb2, job_events
from triptych.proxy.encoders.encoder_client import EncodeStream
from triptych.proxy.encoders.job import EncoderJob
from triptych.proxy.encoders.known_items import KnownItems
from triptych.proxy.events import JobEvent


def end(key: str) -> JobEvent:
    return job_ready(key, bare_plan(key), encode=0.1, save=0.1)


def store(items: KnownItems, key: str, now: float) -> None:
    items.store(bare_plan(key), end(key), now)


def known(items: KnownItems, keys: str = "abcd") -> list[str]:
    return [key for key in keys if items.plan(key)]


def test_an_item_that_landed_during_a_look_up_is_found_and_an_older_one_is_not() -> None:
    items = KnownItems()
    store(items, "a", 10.0)
    assert items.stored_since("a", 10.0) == end("a")
    assert items.stored_since("a", 10.1) is None
    assert items.stored_since("b", 0.0) is None


def test_an_item_that_lands_again_landed_when_it_did_last() -> None:
    items = KnownItems()
    store(items, "a", 0.0)
    store(items, "a", 60.0)
    items.learn(bare_plan("a"))  # seen by a look-up
    assert items.stored_since("a", 60.0) is not None


def test_the_plans_used_least_recently_are_forgotten_with_all_else() -> None:
    items = KnownItems(capacity=3)
    for key in "abcad":
        store(items, key, 0.0)
    assert known(items) == ["a", "c", "d"]
    assert items.stored_since("b", 0.0) is None
    assert len(items) == 3


def test_plans_of_many_stretches_take_the_room_of_many() -> None:
    items = KnownItems(capacity=10)
    long = replace(bare_plan("l"), runs=tuple((index * 2, 1) for index in range(8)))
    for one in (bare_plan("a"), long, bare_plan("b"), long):  # the same one again takes no room twice
        items.learn(one)
    assert known(items, "alb") == ["l", "b"]
    assert len(items) == 2


def test_what_has_a_job_or_is_still_to_be_loaded_stays_when_its_plan_is_forgotten() -> None:
    items = KnownItems(capacity=1)
    job = EncoderJob("a", "n", 1)
    items.add_job(job)
    items.learn(bare_plan("a"))
    items.publish("b", 8, ["r"])
    items.learn(bare_plan("b"))
    items.learn(bare_plan("c"))
    assert known(items) == ["c"]
    assert items.job("a") is job and items.loads("b", "r")
    items.remove_job(job)
    items.end("r")
    assert (len(items), items.published_bytes) == (1, 0)


def test_bytes_count_until_the_last_request_that_has_still_to_load_them_has_ended() -> None:
    items = KnownItems()
    items.publish("a", 8, ["r", "s"])
    items.publish("a", 9, ["t"])  # counts already
    items.end("r")
    assert items.published_bytes == 8 and not items.loads("a", "t")
    items.end("s")
    items.free("a")
    assert (len(items), items.published_bytes) == (0, 0)


class Answers:
    """A channel whose one call answers with these events, and notes the moment that ends it before each."""

    def __init__(self, *events: encoder_pb2.EncodeEvent) -> None:
        self.events, self.until = events, list[float | None]()
        self.stream: EncodeStream

    def stream_stream(self, *_: Any, **__: Any) -> Any:
        return self._answer

    stream_unary = stream_stream

    async def _answer(self, *_: Any, **__: Any) -> AsyncIterator[encoder_pb2.EncodeEvent]:
        for event in self.events:
            assert self.stream._deadline is not None
            self.until.append(self.stream._deadline.when())
            yield event


async def test_a_word_that_the_tower_gets_on_gives_the_job_its_whole_time_again() -> None:
    plan = job_events.planned(bare_plan("a"))
    end = encoder_pb2.EncodeEvent(ready=encoder_pb2.ItemReady(plan=plan.planned))
    channel, told = Answers(plan, job_events.WAITS, end), list[tuple[str, object]]()
    media: Any = SimpleNamespace(retain=lambda: None, release=lambda: None)
    job = encoder_pb2.EncodeJob(job_id="a-1.0")
    channel.stream = EncodeStream(
        channel,  # type: ignore[arg-type]
        job,
        media,
        lambda *event: told.append(event),
        phase_timeout=60.0,
    )
    assert await channel.stream.result() == end
    assert told == [("a-1.0", plan)]
    first, until_run, after_waits = channel.until
    assert first is not None and until_run is None and after_waits is not None and after_waits > first


async def test_from_permission_on_the_worker_has_its_time_for_the_tower() -> None:
    plan = job_events.planned(bare_plan("a"))
    end = encoder_pb2.EncodeEvent(ready=encoder_pb2.ItemReady(plan=plan.planned))
    channel = Answers(plan, end)
    media: Any = SimpleNamespace(retain=lambda: None, release=lambda: None)
    channel.stream = EncodeStream(
        channel,  # type: ignore[arg-type]
        encoder_pb2.EncodeJob(job_id="a-1.0"),
        media,
        lambda *event: channel.stream.run(),
        phase_timeout=60.0,
    )
    assert await channel.stream.result() == end
    assert channel.until[1] is not None
