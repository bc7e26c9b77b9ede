from __future__ import annotations

import asyncio
import threading

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from triptych.base.delta import Delta
from triptych.base.errors import InternalError
from triptych.base.types import FinishReason
from triptych.pd_worker.core.outputs import RawLogprobs
from triptych.pd_worker.events.request_log import RequestLog
from triptych.pd_worker.events.streams import (
    CROWD,
    KEEP_DETACHED_SECONDS,
    KEEP_FINISHED_SECONDS,
    EventStream,
    EventStreams,
)
from triptych.pd_worker.events.token_texts import TokenTexts
from triptych.protos import pd_pb2
from triptych.protos.convert import error_to_proto
from triptych.protos.pd_pb2 import Admitted, Finished, ItemLoaded, ItemMissing, ItemPlacement, RequestEvent

KEY = "a" * 64


class Box:
    """Event streams with a clock of its own, and what it has cancelled."""

    def __init__(self, texts: TokenTexts | None = None) -> None:
        self.now = 100.0
        self.cancelled: list[tuple[list[str], str]] = []
        self.streams = EventStreams(
            lambda ids, proxy: self.cancelled.append((list(ids), proxy)), lambda: self.now, texts
        )

    def opened(self, *requests: str, **options: bool) -> EventStream:
        """The stream of an attached proxy with these requests, or with one."""
        stream = self.streams.attach("p1", [], **options)
        for request in requests or ("r1",):
            self.streams.open("p1", request, 1)
        return stream

    def attach(self, *named: pd_pb2.Reattach) -> EventStream:
        return self.streams.attach("p1", named)

    def deliver(self, *events) -> None:
        self.streams.deliver(events)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.streams.sweep()


@pytest.fixture
async def box() -> Box:
    return Box()


def names(request="r1", attempt=1, proxy="p1"):
    return {"request_id": request, "attempt": attempt, "proxy_id": proxy}


def tokens(position, *ids, text="", **who):
    return Delta(text, ids, position=position, **names(**who))


def finished(reason=FinishReason.STOP, error=None, **who):
    end = Finished(reason=reason, error=error and error_to_proto(error), work_seconds=5)
    return RequestEvent(finished=end, **names(**who))


def admitted(**who):
    places = [ItemPlacement(offset=1, length=2)]
    return RequestEvent(admitted=Admitted(prompt_token_ids=(1, 2, 3), placements=places), **names(**who))


def loaded(seconds):
    return RequestEvent(item_loaded=ItemLoaded(mm_hash=KEY, seconds=seconds), **names())


def reattach(position, request="r1", attempt=1):
    return pd_pb2.Reattach(request_id=request, attempt=attempt, position=position)


async def following(stream):
    return list((await asyncio.wait_for(stream.next(), 1)).events)


def kinds(events):
    return [(event.request_id, event.WhichOneof("body")) for event in events]


async def test_one_steps_events_of_all_requests_are_one_message(box):
    stream = box.opened("r1", "r2")
    box.deliver(admitted(), tokens(0, 7, text="a"), tokens(0, 8, text="b", request="r2"))
    events = await following(stream)
    assert kinds(events) == [("r1", "admitted"), ("r1", "tokens"), ("r2", "tokens")]
    assert list(events[0].admitted.prompt_token_ids) == [1, 2, 3]
    assert [event.proxy_id for event in events] == [""] * 3
    assert [(p.offset, p.length) for p in events[0].admitted.placements] == [(1, 2)]


async def test_what_waits_for_a_slow_proxy_is_merged(box):
    stream = box.opened()
    for position in range(1000):
        box.deliver(tokens(position, position, text="x"))
    box.deliver(finished())
    events = await following(stream)
    assert kinds(events) == [("r1", "tokens"), ("r1", "finished")]
    assert events[0].tokens.position == 0
    assert list(events[0].tokens.token_ids) == list(range(1000))
    assert events[0].tokens.text == "x" * 1000


async def test_events_of_other_attempts_and_unknown_requests_are_dropped(box):
    stream = box.streams.attach("p1", [])
    box.streams.open("p1", "r1", 2, resumed_tokens=4)
    box.deliver(tokens(0, 1, attempt=1), tokens(0, 1, request="r9"), tokens(0, 1, proxy="p9"))
    box.deliver(tokens(4, 9, attempt=2))
    events = await following(stream)
    assert [(e.attempt, e.tokens.position, list(e.tokens.token_ids)) for e in events] == [(2, 4, [9])]


async def test_a_reattached_proxy_gets_everything_after_its_position_again(box):
    first = box.opened()
    box.deliver(admitted(), loaded(0.5))
    for position, text in enumerate("abcd"):
        box.deliver(tokens(position, position, text=text))
    await following(first)
    box.streams.detach(first)
    box.deliver(tokens(4, 4, text="e"))
    events = await following(box.attach(reattach(2)))
    assert kinds(events) == [("r1", "admitted"), ("r1", "item_loaded"), ("r1", "tokens")]
    assert (events[2].tokens.position, events[2].tokens.text) == (2, "cde")
    assert list(events[2].tokens.token_ids) == [2, 3, 4]
    assert box.cancelled == []


async def test_the_last_event_is_sent_again_to_a_proxy_that_missed_it(box):
    first = box.opened()
    box.deliver(tokens(0, 1, text="a"), finished())
    await following(first)
    box.wait(KEEP_FINISHED_SECONDS - 1)
    events = await following(box.attach(reattach(1)))
    assert kinds(events) == [("r1", "finished")] and events[0].finished.work_seconds == 5


async def test_a_finished_request_is_forgotten_in_the_end(box):
    stream = box.opened()
    box.deliver(finished())
    await following(stream)
    box.wait(KEEP_FINISHED_SECONDS + 1)
    assert not box.streams.holds("p1", "r1", 1)
    assert box.cancelled == []


async def test_a_finished_request_is_kept_until_its_attached_proxy_has_fetched_it(box):
    stream = box.opened()
    box.deliver(finished())
    box.wait(100 * KEEP_FINISHED_SECONDS)
    assert kinds(await following(stream)) == [("r1", "finished")]


@pytest.mark.parametrize(
    "named",
    [reattach(0, request="r9"), reattach(1, attempt=2), reattach(1), reattach(5)],
    ids=["unknown", "attempt", "inside a message", "beyond"],
)
async def test_a_request_that_cannot_go_on_is_lost(box, named):
    first = box.opened()
    box.deliver(tokens(0, 1, 2, text="ab"))
    await following(first)
    events = await following(box.attach(named))
    assert kinds(events) == [(named.request_id, "lost")]
    assert events[0].attempt == named.attempt
    assert box.cancelled == [(["r1"], "p1")]


async def test_requests_that_are_not_named_are_cancelled(box):
    box.opened("r1", "r2", "r3")
    box.deliver(finished(request="r3"))
    box.attach(reattach(0, request="r2"))
    assert box.cancelled == [(["r1"], "p1")]
    assert box.streams.unfinished == 1


async def test_a_proxy_that_stays_away_loses_its_requests(box):
    stream = box.opened()
    box.streams.detach(stream)
    box.wait(KEEP_DETACHED_SECONDS - 0.1)
    assert box.cancelled == []
    box.wait(0.2)
    assert box.cancelled == [(["r1"], "p1")]
    assert box.streams.idle


async def test_a_proxy_that_never_attaches_loses_its_requests(box):
    box.streams.open("p1", "r1", 1)
    box.wait(KEEP_DETACHED_SECONDS + 0.1)
    assert box.cancelled == [(["r1"], "p1")]


async def test_the_end_of_a_replaced_stream_detaches_no_proxy(box):
    old = box.opened()
    box.attach(reattach(0))
    assert await asyncio.wait_for(old.next(), 1) is None
    box.streams.detach(old)
    box.wait(10 * KEEP_DETACHED_SECONDS)
    assert box.cancelled == []


async def test_a_later_attempt_takes_the_place_of_the_earlier(box):
    assert box.streams.open("p1", "r1", 1)
    assert not box.streams.open("p1", "r1", 1)
    assert box.streams.open("p1", "r1", 2)
    assert not box.streams.open("p1", "r1", 1)
    assert box.cancelled == [(["r1"], "p1")]
    assert box.streams.holds("p1", "r1", 2)
    assert box.streams.unfinished == 1


async def test_each_end_of_a_request_is_counted_once(box):
    names = ("finished", "failed", "cancelled", "handed over", "lost")
    box.opened(*names)
    box.streams.open("p1", "other", 1, tenant="b")
    assert box.streams.unfinished_of_tenants == {"": 5, "b": 1}
    box.deliver(finished(request="finished"), finished(request="finished"))
    box.streams._proxies["p1"].requests["failed"].fail(InternalError("x"))
    box.streams.cancel("p1", ["cancelled", "finished", "failed"])
    assert box.streams.unfinished_of_tenants == {"": 2, "b": 1}
    box.streams.close("p1", "handed over", 1)
    box.streams.hand_over()
    box.streams.lose_engine()
    assert box.streams.unfinished_of_tenants == {}


async def test_what_is_unfinished_is_known_without_a_look_at_any_request(box, monkeypatch):
    """A worker keeps what has finished for seconds: thousands of small requests, and each Submit asks."""
    box.opened(*(f"r{number}" for number in range(50)))
    box.deliver(*(finished(request=f"r{number}") for number in range(49)))
    looked = []
    monkeypatch.setattr(RequestLog, "__getattribute__", lambda log, name: looked.append(name))
    assert (box.streams.unfinished, looked) == (1, [])
    monkeypatch.undo()


async def test_an_attempt_that_was_given_up_stays_known_while_its_events_may_come(box):
    box.streams.attach("p1", [])
    box.streams.open("p1", "r1", 2)
    box.streams.cancel("p1", ["r1"])
    box.wait(KEEP_FINISHED_SECONDS - 1)
    assert not box.streams.open("p1", "r1", 1)
    assert not box.streams.open("p1", "r1", 2)
    assert box.streams.open("p1", "r1", 3)


async def test_what_has_been_is_forgotten_in_the_end(box):
    box.streams.attach("p1", [])
    for request in ("r1", "r2"):
        box.streams.open("p1", request, 1)
        box.streams.cancel("p1", [request])
        box.wait(KEEP_FINISHED_SECONDS - 1)
    assert box.streams.open("p1", "r1", 1)
    assert not box.streams.open("p1", "r2", 1)


async def test_a_missing_item_is_reported_again_until_it_is_ready(box):
    first = box.opened()
    body = ItemMissing(mm_hash=KEY, damaged_digest="d")
    box.deliver(RequestEvent(item_missing=body, **names()))
    await following(first)
    events = await following(box.attach(reattach(0)))
    assert (events[0].item_missing.mm_hash, events[0].item_missing.damaged_digest) == (KEY, "d")
    box.streams.items_ready("p1", [KEY])
    box.attach(reattach(0))
    box.deliver(loaded(1.0))
    assert kinds(await following(box.attach(reattach(0)))) == [("r1", "item_loaded")]


async def test_a_request_that_is_given_up_is_forgotten_at_once(box):
    box.streams.open("p1", "r1", 1)
    box.streams.cancel("p1", ["r1", "r9", "r1"])
    box.streams.cancel("p9", ["r1"])
    assert box.cancelled == [(["r1"], "p1")]
    assert not box.streams.holds("p1", "r1", 1)


async def test_a_shut_down_stream_ends_after_its_last_events(box):
    stream = box.opened()
    box.deliver(finished())
    assert not box.streams.idle
    box.streams.shut_down()
    assert kinds(await following(stream)) == [("r1", "finished")]
    assert box.streams.idle
    assert await asyncio.wait_for(stream.next(), 1) is None


async def test_what_has_not_finished_at_a_shut_down_is_lost_after_its_last_tokens(box):
    stream = box.opened()
    box.deliver(tokens(0, 1, text="a"))
    box.streams.shut_down()
    assert kinds(await following(stream)) == [("r1", "tokens"), ("r1", "lost")]


async def test_the_engines_thread_wakes_a_waiting_stream(box):
    stream = box.opened()
    waiting = asyncio.create_task(following(stream))
    await asyncio.sleep(0)
    thread = threading.Thread(target=box.streams.emit, args=([tokens(0, 1)],))
    thread.start()
    assert kinds(await waiting) == [("r1", "tokens")]
    thread.join()


async def test_a_beat_reaches_every_proxy_with_or_without_events(box):
    streams = [box.streams.attach(proxy, []) for proxy in ("p1", "p2")]
    box.streams.beat(7, 1.0)
    for stream in streams:
        assert await stream.next() == pd_pb2.StepEvents(beat=pd_pb2.Beat(count=7, patience=1.0))
    box.streams.open("p1", "r1", 1)
    box.deliver(tokens(0, 5, text="a"))
    box.streams.beat(8, 10.0)
    message = await streams[0].next()
    assert [event.tokens.text for event in message.events] == ["a"]
    assert (message.beat.count, message.beat.patience) == (8, 10.0)


async def test_beats_that_a_slow_proxy_has_not_taken_are_one(box):
    stream = box.streams.attach("p1", [])
    for count in range(5):
        box.streams.beat(count, 1.0)
    assert (await stream.next()).beat.count == 4
    box.streams.deliver([])
    box.streams.shut_down()
    assert await stream.next() is None


async def test_an_event_that_cannot_be_filed_ends_its_request_and_no_other(box):
    stream = box.opened("r1", "r2", "r3")
    bad = tokens(0, -1, text="no token is negative", request="r2")
    box.deliver(tokens(0, 5, text="a"), bad, tokens(0, 6, text="c", request="r3"))
    box.deliver(finished(request="r2"))
    events = {event.request_id: event for event in (await stream.next()).events}
    assert [events[request].tokens.text for request in ("r1", "r3")] == ["a", "c"]
    assert events["r2"].finished.error.code == InternalError.code
    assert box.cancelled == [(["r2"], "p1")]


async def test_events_that_cannot_be_sent_end_their_request_and_not_the_stream(box, monkeypatch):
    stream = box.opened("r1", "r2")
    box.deliver(tokens(0, 5, text="\ud800", request="r1"), tokens(0, 6, text="b", request="r2"))
    events = {event.request_id: event for event in (await stream.next()).events}
    assert events["r1"].finished.error.code == InternalError.code
    assert events["r2"].tokens.text == "b"


async def test_new_output_of_many_requests_is_lists_for_a_proxy_that_reads_them(box):
    stream = box.opened("r1", "r2", step_tokens=True)
    box.deliver(admitted(), tokens(0, 7, text="a"), admitted(request="r2"), tokens(0, 8, request="r2"))
    assert kinds(await following(stream)) == [
        ("r1", "admitted"),
        ("r1", "tokens"),
        ("r2", "admitted"),
        ("r2", "tokens"),
    ]
    box.deliver(tokens(1, 9, text="ñ"), tokens(1, 6, 5, request="r2", text="b"))
    box.deliver(tokens(2, 4, text="c"))
    message = await asyncio.wait_for(stream.next(), 1)
    lists = message.tokens
    assert not message.events
    assert list(lists.request_ids) == ["r1", "r2"]
    assert list(lists.attempts) == [1, 1]
    assert list(lists.positions) == [1, 1]
    assert list(lists.texts) == ["ñc", "b"]
    assert (list(lists.token_ids), list(lists.counts)) == ([9, 4, 6, 5], [2, 2])
    box.deliver(tokens(3, 3), tokens(3, 2, request="r2"))
    lists = (await asyncio.wait_for(stream.next(), 1)).tokens
    assert (list(lists.token_ids), list(lists.counts)) == ([3, 2], [])


async def test_what_others_have_is_not_behind_the_crowd_of_one_tenant(box):
    stream = box.streams.attach("p1", [])
    crowd, others = [f"a{number}" for number in range(CROWD)], ["b", "c"]
    for request in (*crowd, *others):
        box.streams.open("p1", request, 1, tenant=request[0])
    everything = [*crowd, *others]
    box.deliver(*(tokens(0, 1, text="x", request=request) for request in everything))
    box.deliver(finished(request="b"))
    stream.lose("gone", 1)
    few, crowded = await stream.next(), await stream.next()
    assert [event.request_id for event in few.events] == ["b", "b", "c"]
    assert [event.request_id for event in crowded.events] == [*crowd, "gone"]
    assert stream.idle
    box.deliver(*(tokens(1, 1, text="x", request=request) for request in crowd))
    assert len((await stream.next()).events) == CROWD
    box.deliver(*(tokens(2, 1, text="x", request=request) for request in (*crowd[: CROWD - 2], "c")))
    assert len((await stream.next()).events) == CROWD - 1


async def test_an_end_stays_behind_its_tokens_and_a_loss_behind_the_lists(box):
    stream = box.opened("r1", "r2", step_tokens=True)
    for name in ("r1", "r2"):
        box.deliver(admitted(request=name), tokens(0, 7, request=name))
    await following(stream)
    box.deliver(tokens(1, 8), finished(), tokens(1, 8, request="r2"))
    box.streams.shut_down()
    message = await asyncio.wait_for(stream.next(), 1)
    assert list(message.tokens.request_ids) == ["r2"]
    assert kinds(message.events) == [("r1", "tokens"), ("r1", "finished"), ("r2", "lost")]


async def test_log_probabilities_are_never_left_behind_by_lists():
    box = Box(TokenTexts(Tokenizer(WordLevel({str(token): token for token in range(10)}))))
    stream = box.opened(step_tokens=True)
    box.deliver(admitted())
    await following(stream)
    raw = RawLogprobs((7, -0.5), ((7, -0.5),))
    box.deliver(Delta("a", (7,), (raw,), **names()))
    (event,) = await following(stream)
    assert event.tokens.logprobs[0].chosen.token_id == 7


async def test_a_text_that_is_no_unicode_ends_its_request_and_leaves_the_lists_whole(box):
    stream = box.opened("r1", "r2", step_tokens=True)
    for name in ("r1", "r2"):
        box.deliver(admitted(request=name))
    await following(stream)
    box.deliver(tokens(0, 7, text="\ud800"), tokens(0, 8, request="r2", text="well"))
    message = await asyncio.wait_for(stream.next(), 1)
    assert list(message.tokens.texts) == ["well"]
    assert kinds(message.events) == [("r1", "finished")]
