"""The feed: one snapshot a second for all listeners, none without them, and slow ones dropped."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from support.fakes.live_view import CountingView, places
from triptych.base.errors import Unavailable
from triptych.proxy.live.service import MAX_MISSED, LiveFeed, event
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
