"""The feed: one snapshot a second for all listeners; as ASGI, listeners that read or take nothing."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from starlette.types import Message

from support.fakes.live_view import EXAMPLE, CountingView, places
from support.waiting import until
from triptych.base.errors import Unavailable
from triptych.proxy.live.objects import ClusterHistory, ClusterSnapshot, Waterfall, draw_row
from triptych.proxy.live.service import MAX_MISSED, EventsEndpoint, LiveFeed, event
from triptych.proxy.quotas.quota import QuotaExceeded


async def test_without_listeners_a_look_makes_no_snapshot() -> None:
    view = CountingView()
    feed = LiveFeed(view, places())
    for _ in range(10):
        feed.poll()
    assert (view.looks, view.snapshots, view.histories) == (10, 0, 0)


async def test_all_listeners_share_one_snapshot_of_a_look() -> None:
    view = CountingView()
    feed = LiveFeed(view, places())
    with feed.listen() as one, feed.listen() as two:
        assert await one.next() == await two.next()
        made = view.snapshots
        feed.poll()
        assert view.snapshots == made + 1
        assert await one.next() is await two.next()
    assert feed.listeners == 0


async def test_a_slow_listener_gets_the_newest_snapshot_alone() -> None:
    feed = LiveFeed(CountingView(), places())
    with feed.listen() as slow:
        for _ in range(MAX_MISSED - 1):
            feed.poll()
        newest = await slow.next()
        assert newest == event("snapshot", feed.snapshot())
        feed.poll()
        assert not slow.closed


async def test_a_listener_that_reads_nothing_is_dropped_and_others_are_not() -> None:
    feed = LiveFeed(CountingView(), places())
    with feed.listen() as dead, feed.listen() as quick:
        for _ in range(MAX_MISSED + 1):
            feed.poll()
            assert await quick.next()
        assert dead.closed and not quick.closed
        assert await dead.next() is None


async def test_a_drain_ends_the_listeners_and_takes_no_new_ones() -> None:
    feed = LiveFeed(CountingView(), places())
    with feed.listen() as listener:
        await listener.next()
        waiting = asyncio.create_task(listener.next())
        await asyncio.sleep(0)
        feed.drain()
        assert await waiting is None
    with pytest.raises(Unavailable), feed.listen():
        pass


async def test_a_look_that_fails_does_not_end_the_feed(caplog: pytest.LogCaptureFixture) -> None:
    view = CountingView()
    looked = asyncio.Event()

    def poll() -> None:
        view.looks += 1
        looked.set()
        raise RuntimeError("a bug")

    view.poll = poll  # type: ignore[method-assign]
    feed = LiveFeed(view, places())
    feed.start()
    await asyncio.wait_for(looked.wait(), 5.0)
    looked.clear()
    await asyncio.wait_for(looked.wait(), 5.0)
    await feed.stop()
    assert view.looks >= 2
    assert "could not be polled" in caplog.text


async def test_the_listeners_of_one_key_leave_places_for_those_of_others() -> None:
    feed = LiveFeed(CountingView(), places())
    with contextlib.ExitStack() as stack:
        for _ in range(16):
            stack.enter_context(feed.listen("alice"))
        with pytest.raises(QuotaExceeded, match="this key holds its share of the places for listeners"):
            stack.enter_context(feed.listen("alice"))
        stack.enter_context(feed.listen("bob"))
        assert feed.listeners == 17
    assert feed.listeners == 0


class Client:
    """One client of the stream; it takes nothing while `takes` is cleared."""

    def __init__(self, endpoint: EventsEndpoint, method: str = "GET") -> None:
        self.sent: list[Message] = []
        self.takes, self.leaves = asyncio.Event(), asyncio.Event()
        self.takes.set()
        scope: dict[str, Any] = {"type": "http", "method": method, "path": "/cluster/events", "headers": []}
        self.task = asyncio.create_task(endpoint(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.takes.wait()
        self.sent.append(message)

    @property
    def events(self) -> list[str]:
        bodies = [message.get("body", b"") for message in self.sent]
        return [body.split(b"\n")[0].decode() for body in bodies if body]


async def test_one_listener_that_takes_nothing_is_dropped_and_the_other_goes_on() -> None:
    feed = LiveFeed(CountingView(), places())
    endpoint = EventsEndpoint(feed, write_seconds=0.2)
    quick, slow = Client(endpoint), Client(endpoint)
    await until(lambda: len(quick.events) == len(slow.events) == 2, "the first events")
    slow.takes.clear()
    feed.poll()
    await until(slow.task.done, "the slow listener's end")
    assert not quick.task.done()
    feed.poll()
    await until(lambda: len(quick.events) >= 4, "further events")
    assert feed.listeners == 1
    quick.leaves.set()
    await quick.task
    assert feed.listeners == 0


async def test_too_many_listeners_get_429_with_a_time_to_come_back() -> None:
    client = Client(EventsEndpoint(LiveFeed(CountingView(), places(capacity=0))))
    await client.task
    assert client.sent[0]["status"] == 429
    assert b"retry-after" in dict(client.sent[0]["headers"])


@pytest.mark.parametrize(
    ("name", "kind"), [("snapshot", ClusterSnapshot), ("history", ClusterHistory), ("record", Waterfall)]
)
def test_the_example_has_all_fields_and_no_others(name: str, kind: type[msgspec.Struct]) -> None:
    read = msgspec.convert(EXAMPLE[name], kind)
    assert msgspec.to_builtins(read) == EXAMPLE[name]


def test_rows_have_names_of_their_own() -> None:
    names = {draw_row() for _ in range(100)}
    assert len(names) == 100
    assert {len(name) for name in names} == {8}
