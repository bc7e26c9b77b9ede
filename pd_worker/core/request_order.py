"""Requests in the order in which they are served."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from triptych.pd_worker.core.request import RequestOrder, RequestState


def _order(state: RequestState) -> RequestOrder:
    return state.order


class OrderedRequests:
    """Requests by their `order`, each once. To be walked over only while nothing enters or leaves."""

    def __init__(self) -> None:
        self._states: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    def __getitem__(self, index: int) -> RequestState:
        return self._states[index]

    def __contains__(self, state: RequestState) -> bool:
        index = bisect.bisect_left(self._states, state.order, key=_order)
        return index < len(self._states) and self._states[index] is state

    def add(self, state: RequestState) -> None:
        """Idempotent."""
        index = bisect.bisect_left(self._states, state.order, key=_order)
        if index == len(self._states) or self._states[index] is not state:
            self._states.insert(index, state)

    def discard(self, state: RequestState) -> None:
        """Idempotent."""
        index = bisect.bisect_left(self._states, state.order, key=_order)
        if index < len(self._states) and self._states[index] is state:
            del self._states[index]
