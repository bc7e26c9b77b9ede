"""The scheduler's requests by id, by item and by deadline."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from triptych.pd_worker.core.request import RequestKey, RequestState, RequestStatus
from triptych.types import MMFeature

#: Entries of finished requests, beyond half of all, that are kept before they are removed.
_FINISHED = 64


class RequestTable:
    """Requests that have not finished, in the order in which they were added."""

    def __init__(self) -> None:
        self._states: dict[RequestKey, RequestState] = {}
        self._by_item: dict[str, dict[RequestState, None]] = {}
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
        for feature in state.features:
            self._by_item.setdefault(feature.mm_hash, {})[state] = None
        self._added += 1
        heapq.heappush(self._deadlines, (state.request.deadline, self._added, state))

    def remove(self, state: RequestState) -> None:
        """Removes a request whose status has become FINISHED."""
        del self._states[state.key]
        for feature in state.features:
            states = self._by_item.get(feature.mm_hash)
            if states is not None:
                states.pop(state, None)
                if not states:
                    del self._by_item[feature.mm_hash]
        self._finished += 1
        if 2 * self._finished > _FINISHED + len(self._deadlines):
            self._deadlines = [
                entry for entry in self._deadlines if entry[2].status is not RequestStatus.FINISHED
            ]
            heapq.heapify(self._deadlines)
            self._finished = 0

    def with_item(self, mm_hash: str) -> list[RequestState]:
        """The requests with this item."""
        return list(self._by_item.get(mm_hash, ()))

    def with_any_item(self, mm_hashes: Iterable[str]) -> list[RequestState]:
        """The requests with any of these items; one with several of them is there several times."""
        return [state for mm_hash in mm_hashes for state in self._by_item.get(mm_hash, ())]

    def features(self) -> Iterator[tuple[str, MMFeature]]:
        """Each mm_hash with the feature of one of its requests."""
        for key, states in self._by_item.items():
            state = next(iter(states))
            yield key, next(feature for feature in state.features if feature.mm_hash == key)

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
