"""Shortages: requests that wait for encoder workers, or for a store that no worker reaches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from triptych.base.errors import RETRY_AFTER, Unavailable
from triptych.proxy.events import EncodersBack, EncodersGone, RequestFailed
from triptych.proxy.ports import RequestEvents
from triptych.proxy.requests.request import InFlightRequest
from triptych.proxy.workers import KnownWorkers

#: Encoders that are away for less, as while they are started again, cost no attempt.
GRACE_SECONDS = 2.0


class EncoderShortage:
    """Looks only at requests while a namespace of theirs is served by no encoder."""

    def __init__(
        self,
        pool: KnownWorkers,
        requests: Mapping[str, InFlightRequest],
        events: RequestEvents,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._events = events
        self._clock = clock
        self._served: frozenset[str] = frozenset()
        self._since: dict[str, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def pool_changed(self) -> None:
        """Encoders may have come or gone."""
        served = self._pool.namespaces_served()
        if served != self._served:
            self._served = served
            self._check()

    def lacking(self, request: InFlightRequest) -> None:
        """The request may hold memory at a PD worker for items that have to be encoded."""
        if self._timer is None and self._unserved(request) and request.lifecycle.lacks_items:
            self._check()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _unserved(self, request: InFlightRequest) -> bool:
        return request.binding is not None and request.binding.namespace not in self._served

    def _check(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock()
        for namespace in self._since.keys() & self._served:
            del self._since[namespace]
        lacking = False
        for request in list(self._requests.values()):
            if not request.lifecycle.lacks_items or request.binding is None:
                continue
            if not self._unserved(request):
                self._events.deliver(request.request_id, EncodersBack())
                continue
            lacking = True
            if now - self._since.setdefault(request.binding.namespace, now) >= GRACE_SECONDS:
                self._events.deliver(request.request_id, EncodersGone())
        if lacking:
            self._timer = asyncio.get_running_loop().call_later(GRACE_SECONDS / 2, self._check)


_POOLS = {"encoder": "encoder worker", "pd": "PD worker"}


class StoreWait:
    """One timer per request, only while all workers of a pool say that they do not reach the store."""

    def __init__(
        self,
        pool: KnownWorkers,
        requests: Mapping[str, InFlightRequest],
        events: RequestEvents,
        seconds: float,
    ) -> None:
        self._pool = pool
        self._requests = requests
        self._events = events
        self._seconds = seconds
        self._lost: tuple[str, ...] = ()
        #: How many times the store was lost: a timer counts for one of them.
        self._losses = 0

    def pool_changed(self) -> None:
        """What workers say of the store may have changed."""
        before, self._lost = self._lost, tuple(filter(self._pool.store_lost, _POOLS))
        if self._lost and not before:
            self._losses += 1
            for request in self._requests.values():
                self.watch(request)

    def watch(self, request: InFlightRequest) -> None:
        """The request's items were looked up, or the store was lost to it."""
        if self._lost and request.binding is not None and request.content.items:
            loop = asyncio.get_running_loop()
            loop.call_later(self._seconds, self._end, request.request_id, self._losses)

    def _end(self, request_id: str, losses: int) -> None:
        request = self._requests.get(request_id)
        if request is None or losses != self._losses or not self._lost or request.first_token is not None:
            return
        for pool in self._lost:
            if request.lifecycle.waits_for(pool):
                message = f"no {_POOLS[pool]} reaches the embedding store"
                error = Unavailable(message, retry_after=RETRY_AFTER)
                self._events.deliver(request_id, RequestFailed(error))
                return
        self.watch(request)
