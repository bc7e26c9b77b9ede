"""The scheduler's requests by id and by deadline; the items have their requests' ids."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from triptych.pd_worker.core.items.item import ItemTable
from triptych.pd_worker.core.request import RequestKey, RequestState, RequestStatus

#: Entries of finished requests, beyond half of all, that are kept before they are removed.
_FINISHED = 64


class RequestTable:
    """Requests that have not finished, in the order in which they were added."""

    def __init__(self, items: ItemTable) -> None:
        self._states: dict[RequestKey, RequestState] = {}
        self._items = items
        self._deadlines: list[tuple[float, int, RequestState]] = []
        self._added = 0
        #: Finished requests that `_deadlines` still has.
        self._finished = 0

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self._states.values()))

    @property
    def num_deadlines(self) -> int:
        """Entries ordered by deadline, those of finished requests that are not removed yet included."""
        return len(self._deadlines)

    def get(self, key: RequestKey) -> RequestState | None:
        return self._states.get(key)

    def add(self, state: RequestState) -> None:
        self._states[state.key] = state
        for use in state.items:
            self._items.add(use.plan.mm_hash).uses[state.key] = use
        self._added += 1
        heapq.heappush(self._deadlines, (state.request.deadline, self._added, state))

    def remove(self, state: RequestState) -> None:
        """Removes a request whose status has become FINISHED."""
        del self._states[state.key]
        for use in state.items:
            item = self._items.get(use.plan.mm_hash)
            item.uses.pop(state.key, None)
            self._items.drop_unused(item)
        self._finished += 1
        if 2 * self._finished > _FINISHED + len(self._deadlines):
            self._deadlines = [
                entry for entry in self._deadlines if entry[2].status is not RequestStatus.FINISHED
            ]
            heapq.heapify(self._deadlines)
            self._finished = 0

    def with_item(self, mm_hash: str) -> list[RequestState]:
        """The requests with this item."""
        return [self._states[key] for key in self._items.get(mm_hash).uses]

    def next_deadline(self) -> float | None:
        """The earliest deadline of a request that has not finished."""
        heap = self._deadlines
        while heap and heap[0][2].status is RequestStatus.FINISHED:
            heapq.heappop(heap)
            self._finished -= 1
        return heap[0][0] if heap else None

    def pop_late(self, now: float) -> list[RequestState]:
        """Requests whose deadline has passed; the caller finishes them."""
        late: list[RequestState] = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            late.append(heapq.heappop(self._deadlines)[2])
            self._finished -= 1  # `remove` counts it, but its entry has gone already.
        return late
