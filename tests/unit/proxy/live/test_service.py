"""The stream as ASGI: listeners that read, one that takes nothing, and clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message

from support.fakes.live_view import CountingView, places
from support.waiting import until
from triptych.proxy.live.service import EventsEndpoint, LiveFeed


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


async def test_a_client_that_leaves_ends_its_stream() -> None:
    feed = LiveFeed(CountingView(), places())
    client = Client(EventsEndpoint(feed))
    await until(lambda: client.events, "the history")
    client.leaves.set()
    await client.task
    assert feed.listeners == 0


async def test_too_many_listeners_get_429_with_a_time_to_come_back() -> None:
    client = Client(EventsEndpoint(LiveFeed(CountingView(), places(capacity=0))))
    await client.task
    assert client.sent[0]["status"] == 429
    assert b"retry-after" in dict(client.sent[0]["headers"])
