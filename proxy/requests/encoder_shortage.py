"""Shortage of encoder workers: requests that wait for one free their room at PD workers meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from triptych.proxy.events import EncodersBack, EncodersGone
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
        """The request may hold room at a PD worker for items that have to be encoded."""
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
