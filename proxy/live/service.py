"""Live data of one proxy: its parts and its HTTP routes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from triptych.base.config import ProxyConfig
from triptych.base.errors import InvalidRequest, NotFound, RequestError, Unavailable
from triptych.base.metrics import ProxyMetrics
from triptych.base.scaling import ScalingDecision
from triptych.proxy.auth.middleware import key_holds, principal_of, sees_all
from triptych.proxy.dispatcher import Dispatcher
from triptych.proxy.http.json_body import convert_field, error_json, retry_after
from triptych.proxy.live.calls import CallLog
from triptych.proxy.live.cluster_view import ClusterSources, ClusterView, WorkerNames
from triptych.proxy.live.failures import MAX_REFUSALS, FailureLog
from triptych.proxy.live.objects import ClusterHistory, ClusterSnapshot, FinishedQuery, RequestRow
from triptych.proxy.live.statistics import STEP_SECONDS, GoodputWindow, Slo
from triptych.proxy.live.waterfall import waterfall
from triptych.proxy.pool import WorkerPool
from triptych.proxy.quotas.quota import Quota
from triptych.store.bulk import StoreMemory

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
#: Snapshots in a row that a listener may miss, of which it gets the newest; then it is dropped.
MAX_MISSED = 10
_RETRY_AFTER = 5.0
_encode = msgspec.json.Encoder().encode


class ClusterReader(Protocol):
    """The cluster's view: a `ClusterView`."""

    def poll(self) -> None: ...
    def snapshot(self) -> ClusterSnapshot: ...
    def requests(self, tenant: str, /) -> list[RequestRow]: ...
    def history(self) -> ClusterHistory: ...


class FeedListener:
    """One reader of the feed. Holds at most the newest event that it has not read."""

    def __init__(self, visible: str = "") -> None:
        self.visible = visible
        self._newest: bytes | None = None
        self._missed = 0
        self._wake = asyncio.Event()
        self.closed = False

    def offer(self, event: bytes) -> None:
        self._missed = 0 if self._newest is None else self._missed + 1
        self._newest = event
        if self._missed >= MAX_MISSED:
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
    """Polls the cluster every second, and serves the result."""

    def __init__(self, view: ClusterReader, places: Quota) -> None:
        self._view = view
        self._places = places
        self._listeners: set[FeedListener] = set()
        self._task: asyncio.Task[None] | None = None
        self._snapshot: tuple[float, ClusterSnapshot] | None = None
        #: The snapshot as JSON, by the tenant whose requests it shows.
        self._by_tenant: dict[str, bytes] = {}
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

    def snapshot(self, visible: str = "") -> bytes:
        """The snapshot as JSON, at most a second old: any number of requests for it costs one.

        It lists the requests of the tenant `visible`, or of all where that is empty.
        """
        now = asyncio.get_running_loop().time()
        if self._snapshot is None or now - self._snapshot[0] >= POLL_SECONDS:
            self._renew(now)
        assert self._snapshot is not None
        if visible not in self._by_tenant:
            snapshot = self._snapshot[1]
            if visible:
                snapshot = msgspec.structs.replace(snapshot, requests=self._view.requests(visible))
            self._by_tenant[visible] = _encode(snapshot)
        return self._by_tenant[visible]

    def _renew(self, now: float) -> None:
        self._snapshot, self._by_tenant = (now, self._view.snapshot()), {}

    def history(self) -> bytes:
        """The history as JSON, made once for each of its points."""
        now = asyncio.get_running_loop().time()
        if self._history is None or now - self._history[0] >= STEP_SECONDS:
            self._history = now, _encode(self._view.history())
        return self._history[1]

    @contextmanager
    def listen(self, tenant: str = "", visible: str = "") -> Iterator[FeedListener]:
        """A listener for as long as the context lasts. QuotaExceeded when there are too many.

        `tenant` is empty where no API keys are in use, `visible` where it may see the requests of all.
        """
        if self._draining:
            raise Unavailable("this proxy is stopping", retry_after=_RETRY_AFTER)
        with self._places.hold(tenant, 1):
            listener = FeedListener(visible)
            self._listeners.add(listener)
            try:
                listener.offer(event("snapshot", self.snapshot(visible)))
                yield listener
            finally:
                self._listeners.discard(listener)

    def poll(self) -> None:
        """One poll, and an event to every listener."""
        self._view.poll()
        if not self._listeners:
            return
        self._renew(asyncio.get_running_loop().time())
        shared = {
            visible: event("snapshot", self.snapshot(visible))
            for visible in {o.visible for o in self._listeners}
        }
        for listener in self._listeners:
            listener.offer(shared[listener.visible])

    async def _forever(self) -> None:
        while True:
            try:
                self.poll()
            except Exception:
                logger.exception("the cluster could not be polled; the next poll follows")
            await asyncio.sleep(POLL_SECONDS)


def event(name: str, data: bytes) -> bytes:
    """One server-sent event of that name; `data` is JSON on one line."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


#: A listener that takes nothing for these seconds is given up.
WRITE_SECONDS = 10.0
_JSON = "application/json"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
_NO_STORE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class LiveData:
    """`calls` subscribes to the recorder before the first call; `start` begins to poll the cluster."""

    def __init__(self, config: ProxyConfig, pool: WorkerPool) -> None:
        self._max_queue = config.max_queue
        self._pool = pool
        self._refusals = FailureLog(MAX_REFUSALS)
        self._feed: LiveFeed | None = None
        slo = Slo(config.page_ttft_slo, config.page_tpot_slo)
        self._names = WorkerNames(pool.workers)
        self.calls = CallLog(GoodputWindow(slo), FailureLog(), pool.model_called, self._names)

    def start(
        self,
        dispatcher: Dispatcher,
        metrics: ProxyMetrics,
        proxy_id: str,
        *,
        decision: Callable[[str], ScalingDecision | None] = lambda pool: None,
        store_memory: Callable[[], StoreMemory | None] = lambda: None,
    ) -> list[Route]:
        """Polls the cluster every second from now on; returns the routes of the results."""
        sources = ClusterSources(
            dispatcher=dispatcher,
            pool=self._pool,
            metrics=metrics,
            calls=self.calls,
            refusals=self._refusals,
            names=self._names,
            proxy_id=proxy_id,
            max_queue=self._max_queue,
            decision=decision,
            store_memory=store_memory,
        )
        self._feed = LiveFeed(ClusterView(sources), dispatcher.quotas["listeners"])
        self._feed.start()
        endpoints = LiveEndpoints(self._feed, self.calls, self._names)
        return [
            Route("/cluster", endpoints.snapshot),
            Route("/cluster/events", EventsEndpoint(self._feed), methods=["GET"]),
            Route("/cluster/requests", endpoints.finished),
            Route("/cluster/requests/{name}", endpoints.record),
        ]

    def refused(self, status: int, route: str) -> None:
        """A request that was refused before it was a call."""
        self._refusals.add_refusal(time.time(), status, route)

    def drain(self) -> None:
        """Ends all streams."""
        if self._feed is not None:
            self._feed.drain()

    async def stop(self) -> None:
        if self._feed is not None:
            await self._feed.stop()


class LiveEndpoints:
    """The replies in one piece. `clock` is the dispatcher's."""

    def __init__(
        self,
        feed: LiveFeed,
        calls: CallLog,
        names: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._feed = feed
        self._calls = calls
        self._names = names
        self._clock = clock

    async def snapshot(self, request: Request) -> Response:
        return Response(
            self._feed.snapshot(_visible_tenant(request.scope)), media_type=_JSON, headers=_NO_STORE
        )

    async def finished(self, request: Request) -> Response:
        """Calls that have ended, by the query: the sender's own, an operator's of all."""
        try:
            query = convert_field(dict(request.query_params), FinishedQuery, "query", strict=False)
        except InvalidRequest as error:
            return refusal(error)
        body = _encode(self._calls.finished(_visible_tenant(request.scope), query))
        return Response(body, media_type=_JSON, headers=_NO_STORE)

    async def record(self, request: Request) -> Response:
        """404 of what another tenant has sent, as of what nobody has; an operator finds both."""
        name = request.path_params["name"]
        recorded = self._calls.find(principal_of(request.scope), name)
        if recorded is None and sees_all(request.scope):
            recorded = self._calls.find_any(name)
        if recorded is None:
            return refusal(
                NotFound("no request of yours of this id is in flight or among the last ones that have ended")
            )
        body = _encode(waterfall(recorded, self._clock(), self._names))
        return Response(body, media_type=_JSON, headers=_NO_STORE)


class EventsEndpoint:
    """ASGI application of the stream: the history once, then a snapshot every second."""

    def __init__(self, feed: LiveFeed, write_seconds: float = WRITE_SECONDS) -> None:
        self._feed = feed
        self._write_seconds = write_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._feed.listen(principal_of(scope), _visible_tenant(scope)) as listener:
                if scope["method"] == "HEAD":
                    listener.close()
                await self._serve(listener, partial(key_holds, scope), receive, send)
        except RequestError as error:
            await refusal(error)(scope, receive, send)

    async def _serve(
        self, listener: FeedListener, key_holds: Callable[[], bool], receive: Receive, send: Send
    ) -> None:
        """Sends until the client goes, takes nothing for too long, its key is withdrawn, or the feed ends."""
        sending = asyncio.create_task(self._send_all(listener, key_holds, send))
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)

    async def _send_all(self, listener: FeedListener, key_holds: Callable[[], bool], send: Send) -> None:
        try:
            await self._send(send, {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            await self._send(send, _part(event("history", self._feed.history())))
            while (data := await listener.next()) is not None and key_holds():
                await self._send(send, _part(data))
            await self._send(send, {"type": "http.response.body", "body": b"", "more_body": False})
        except (TimeoutError, OSError):
            logger.info("a listener of the live data takes nothing any more, and is dropped")

    async def _send(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._write_seconds):
            await send(message)


def _visible_tenant(scope: Scope) -> str:
    """The tenant whose requests the sender may see; empty: those of all."""
    return "" if sees_all(scope) else principal_of(scope)


def _part(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


def refusal(error: RequestError) -> Response:
    wait = retry_after(error)
    headers = _NO_STORE | ({"retry-after": wait} if wait else {})
    return Response(error_json(error), status_code=error.status, media_type=_JSON, headers=headers)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
