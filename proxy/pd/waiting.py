"""Requests that wait for a PD worker, in turns between tenants."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator

from triptych.base.least_service import LeastService
from triptych.proxy.requests.instructions import Submit
from triptych.proxy.requests.request import InFlightRequest

Entry = tuple[InFlightRequest, Submit]
#: A tenant's own order (not resumed, priority, arrival), the number of the entry, request id.
_Place = tuple[tuple[bool, int, int], int, str]


class WaitingSubmits:
    """Between tenants by least service, which is counted in requests handed over; inside one resumed requests
    come first, then those of lower priority, then by arrival."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        #: Old ones drop out at the top.
        self._heaps: dict[str, list[_Place]] = {}
        self._numbers: dict[str, int] = {}
        self._number = 0
        self._turns = LeastService()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def order_of(self, request_id: str) -> Submit | None:
        """What is to be submitted of the request; None where it does not wait."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry[1]

    def add(self, request: InFlightRequest, order: Submit) -> None:
        """In place of an earlier attempt."""
        request_id, tenant = request.request_id, request.call.tenant
        if not self._entries:
            self._turns.rest()
            self._heaps.clear()
        self._number += 1
        self._entries[request_id], self._numbers[request_id] = (request, order), self._number
        if tenant not in self._heaps:
            self._heaps[tenant] = []
            self._turns.enter(tenant)
        own = (not request.resumed, request.call.priority, request.order)
        heapq.heappush(self._heaps[tenant], (own, self._number, request_id))

    def discard(self, request_id: str) -> None:
        """Idempotent."""
        self._entries.pop(request_id, None)
        self._numbers.pop(request_id, None)

    def hand_over(self, request: InFlightRequest) -> None:
        """The request leaves for a worker: its tenant has had a turn."""
        self.discard(request.request_id)
        self._turns.charge(request.call.tenant, 1.0)

    def in_turns(self, may: Callable[[str], bool] = lambda tenant: True) -> Generator[Entry, None, None]:
        """Each once, to be looked at and left, or handed over; the next one is chosen after that. Of tenants
        that `may` have one handed over now."""
        if len(self._entries) == 1:
            [only] = self._entries.values()  # one entry: there is no choice
            if may(only[0].call.tenant):
                yield only
            return
        passed: list[tuple[str, _Place]] = []
        try:
            while (tenant := self._next(may)) is not None:
                place = heapq.heappop(self._heaps[tenant])
                passed.append((tenant, place))
                yield self._entries[place[2]]
        finally:
            for tenant, place in passed:
                if self._numbers.get(place[2]) == place[1]:
                    heapq.heappush(self._heaps[tenant], place)
            self._heaps = {tenant: heap for tenant, heap in self._heaps.items() if heap}

    def _next(self, may: Callable[[str], bool]) -> str | None:
        """The tenant that is next of those with something left."""
        left = [tenant for tenant, heap in self._heaps.items() if may(tenant) and self._clean(heap)]
        return self._turns.next(left) if left else None

    def _clean(self, heap: list[_Place]) -> bool:
        while heap and self._numbers.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        return bool(heap)
