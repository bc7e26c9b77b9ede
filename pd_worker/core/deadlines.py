"""When requests have to have ended."""

from __future__ import annotations

import heapq

from triptych.pd_worker.core.request import RequestState, RequestStatus

#: Requests that have ended may make up this many, and as many as the others, before they are swept out.
_ENDED = 64


class Deadlines:
    """Requests by deadline, the earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, RequestState]] = []
        self._count = 0
        self._ended = 0

    def __len__(self) -> int:
        """Requests that are kept, those included that have ended and are not swept out."""
        return len(self._heap)

    def add(self, state: RequestState) -> None:
        self._count += 1
        heapq.heappush(self._heap, (state.request.deadline, self._count, state))

    def ended(self) -> None:
        """A request's status has become FINISHED."""
        self._ended += 1
        if 2 * self._ended > _ENDED + len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].status is not RequestStatus.FINISHED]
            heapq.heapify(self._heap)
            self._ended = 0

    def next(self) -> float | None:
        """The earliest deadline of a request that has not ended."""
        heap = self._heap
        while heap and heap[0][2].status is RequestStatus.FINISHED:
            heapq.heappop(heap)
            self._ended -= 1
        return heap[0][0] if heap else None

    def late(self, now: float) -> list[RequestState]:
        """Requests that should have ended by `now`; drained."""
        late: list[RequestState] = []
        while (deadline := self.next()) is not None and deadline <= now:
            late.append(heapq.heappop(self._heap)[2])
            self._ended -= 1  # It ends now.
        return late
