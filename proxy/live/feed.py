"""Feed of live data to its listeners: one snapshot a second for all of them, made while there are any."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from triptych.base.errors import Unavailable
from triptych.proxy.live.objects import ClusterHistory, ClusterSnapshot, RequestRow
from triptych.proxy.live.statistics import STEP_SECONDS
from triptych.proxy.quotas.quota import Quota

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
#: Snapshots in a row that a listener may miss, of which it gets the newest; then it is dropped.
MOST_MISSED = 10
_RETRY_AFTER = 5.0
_encode = msgspec.json.Encoder().encode


class LookedAt(Protocol):
    """The cluster's view: a `ClusterView`."""

    def look(self) -> None: ...
    def snapshot(self) -> ClusterSnapshot: ...
    def requests(self, tenant: str, /) -> list[RequestRow]: ...
    def history(self) -> ClusterHistory: ...


class Listener:
    """One reader of the feed. Holds at most the newest event that it has not read."""

    def __init__(self, shown: str = "") -> None:
        self.shown = shown
        self._newest: bytes | None = None
        self._missed = 0
        self._wake = asyncio.Event()
        self.closed = False

    def offer(self, event: bytes) -> None:
        self._missed = 0 if self._newest is None else self._missed + 1
        self._newest = event
        if self._missed >= MOST_MISSED:
            self.close()
        self._wake.set()

    def close(self) -> None:
        self.closed = True
        self._wake.set()

    async def next(self) -> bytes | None:
        """The newest event that was not read; None at the feed's end, or when too many were missed."""
        while not self.closed:
            event, self._newest = self._newest, None
            if event is not None:
                return event
            self._wake.clear()
            await self._wake.wait()
        return None


class LiveFeed:
    """Looks at the cluster every second, and serves what it sees."""

    def __init__(self, view: LookedAt, places: Quota) -> None:
        self._view = view
        self._places = places
        self._listeners: set[Listener] = set()
        self._task: asyncio.Task[None] | None = None
        self._snapshot: tuple[float, ClusterSnapshot] | None = None
        #: The snapshot as JSON, by the tenant whose requests it shows.
        self._shown: dict[str, bytes] = {}
        self._history: tuple[float, bytes] | None = None
        self._draining = False

    @property
    def listeners(self) -> int:
        return len(self._listeners)

    def start(self) -> None:
        self._task = asyncio.create_task(self._forever(), name="live data")

    async def stop(self) -> None:
        self.drain()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def drain(self) -> None:
        """Ends all streams: clients go to another proxy."""
        self._draining = True
        for listener in self._listeners:
            listener.close()

    def snapshot(self, shown: str = "") -> bytes:
        """The snapshot as JSON, at most a second old: so many requests for it cost no more than one.

        It lists the requests of the tenant `shown`, or of all where that is empty.
        """
        now = asyncio.get_running_loop().time()
        if self._snapshot is None or now - self._snapshot[0] >= LOOK_SECONDS:
            self._renew(now)
        assert self._snapshot is not None
        if shown not in self._shown:
            snapshot = self._snapshot[1]
            if shown:
                snapshot = msgspec.structs.replace(snapshot, requests=self._view.requests(shown))
            self._shown[shown] = _encode(snapshot)
        return self._shown[shown]

    def _renew(self, now: float) -> None:
        self._snapshot, self._shown = (now, self._view.snapshot()), {}

    def history(self) -> bytes:
        """The history as JSON, made once for each of its points."""
        now = asyncio.get_running_loop().time()
        if self._history is None or now - self._history[0] >= STEP_SECONDS:
            self._history = now, _encode(self._view.history())
        return self._history[1]

    @contextmanager
    def listen(self, tenant: str = "", shown: str = "") -> Iterator[Listener]:
        """A listener for as long as the context lasts. QuotaExceeded when there are too many.

        `tenant` is empty where no API keys are in use, `shown` where it may see the requests of all.
        """
        if self._draining:
            raise Unavailable("this proxy is stopping", retry_after=_RETRY_AFTER)
        with self._places.hold(tenant, 1):
            listener = Listener(shown)
            self._listeners.add(listener)
            try:
                listener.offer(event("snapshot", self.snapshot(shown)))
                yield listener
            finally:
                self._listeners.discard(listener)

    def look(self) -> None:
        """One look, and an event to every listener."""
        self._view.look()
        if not self._listeners:
            return
        self._renew(asyncio.get_running_loop().time())
        shared = {
            shown: event("snapshot", self.snapshot(shown)) for shown in {o.shown for o in self._listeners}
        }
        for listener in self._listeners:
            listener.offer(shared[listener.shown])

    async def _forever(self) -> None:
        while True:
            try:
                self.look()
            except Exception:
                logger.exception("the cluster could not be looked at; the next look follows")
            await asyncio.sleep(LOOK_SECONDS)


def event(name: str, data: bytes) -> bytes:
    """One server-sent event of that name; `data` is JSON on one line."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"
