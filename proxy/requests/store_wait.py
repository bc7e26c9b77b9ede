"""The limit on waiting for an embedding store that no worker reaches: 503 for who has got nothing yet."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from triptych.base.errors import RETRY_AFTER, Unavailable
from triptych.proxy.events import RequestFailed
from triptych.proxy.ports import RequestEvents
from triptych.proxy.requests.request import InFlightRequest
from triptych.proxy.workers import KnownWorkers

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
