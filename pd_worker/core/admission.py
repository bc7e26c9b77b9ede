"""Admission of requests, in their order, with the bytes of their distinct items reserved."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from triptych.base.config import format_size
from triptych.base.errors import InvalidRequest, RequestError
from triptych.base.types import MMFeature
from triptych.pd_worker.core.request import RequestOrder


class HasOrder(Protocol):
    """A request in a queue."""

    @property
    def order(self) -> RequestOrder: ...


R = TypeVar("R", bound=HasOrder)


def order_of(request: HasOrder) -> RequestOrder:
    return request.order


def distinct_bytes(features: Iterable[MMFeature]) -> dict[str, int]:
    """Bytes of every distinct item, by mm_hash."""
    return {feature.mm_hash: feature.plan.nbytes for feature in features}


class Admission:
    """Reservations of bytes by key; requests that share an item share its reservation."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._reserved = 0
        self._nbytes: dict[str, int] = {}
        self._holders: dict[str, set[str]] = {}
        self._keys: dict[str, set[str]] = {}

    @property
    def reserved(self) -> int:
        """Bytes reserved."""
        return self._reserved

    def check(self, features: Iterable[MMFeature]) -> None:
        """InvalidRequest when the items could never be resident together."""
        sizes = distinct_bytes(features)
        total = sum(sizes.values())
        if total > self.capacity:
            parts = " + ".join(format_size(nbytes) for nbytes in sizes.values())
            raise InvalidRequest(
                f"the request's {len(sizes)} different items need {parts} = {format_size(total)} of "
                f"embeddings, but --encoder-cache-memory is {format_size(self.capacity)}: "
                "send fewer or smaller items, or raise --encoder-cache-memory",
                param="messages",
            )

    def reserve(self, request_id: str, sizes: Mapping[str, int]) -> bool:
        """Reserves all of `sizes` (bytes by key) or nothing; what the request has already costs nothing."""
        new = sum(nbytes for key, nbytes in sizes.items() if key not in self._nbytes)
        if self._reserved + new > self.capacity:
            return False
        self._reserved += new
        for key, nbytes in sizes.items():
            self._nbytes.setdefault(key, nbytes)
            self._holders.setdefault(key, set()).add(request_id)
            self._keys.setdefault(request_id, set()).add(key)
        return True

    def holds(self, request_id: str, key: str) -> bool:
        """Whether the request has a reservation of the key."""
        return key in self._keys.get(request_id, ())

    def release(self, request_id: str, key: str) -> None:
        """Drops the request's reservation of the key. Idempotent."""
        keys = self._keys.get(request_id)
        if keys is None or key not in keys:
            return
        keys.discard(key)
        if not keys:
            del self._keys[request_id]
        holders = self._holders[key]
        holders.discard(request_id)
        if not holders:
            del self._holders[key]
            self._reserved -= self._nbytes.pop(key)

    def release_request(self, request_id: str) -> None:
        """Drops all reservations of the request. Idempotent."""
        for key in list(self._keys.get(request_id, ())):
            self.release(request_id, key)


class OrderedRequests(Generic[R]):
    """Requests sorted by `order`, each once. Not to be changed in an iteration other than `one_by_one`."""

    def __init__(self) -> None:
        self._requests: list[R] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[R]:
        return iter(self._requests)

    def one_by_one(self) -> Iterator[R]:
        """In order; each is looked up when it is asked for, so that requests may be added and discarded."""
        index = 0
        while index < len(self._requests):
            request = self._requests[index]
            yield request
            index = bisect.bisect_right(self._requests, request.order, key=order_of)

    @property
    def first(self) -> R | None:
        return self._requests[0] if self._requests else None

    def add(self, request: R) -> None:
        """Idempotent."""
        index = bisect.bisect_left(self._requests, request.order, key=order_of)
        if index == len(self._requests) or self._requests[index] is not request:
            self._requests.insert(index, request)

    def discard(self, request: R) -> None:
        """Idempotent."""
        index = bisect.bisect_left(self._requests, request.order, key=order_of)
        if index < len(self._requests) and self._requests[index] is request:
            del self._requests[index]


class AdmissionQueue(Generic[R]):
    """Requests that wait to be admitted, by `order`.

    Those with items wait for all such requests before them, so that small ones never starve a large one;
    those without wait for none of these.
    """

    def __init__(self) -> None:
        self._with_items = OrderedRequests[R]()
        self._without = OrderedRequests[R]()

    def add(self, request: R, *, has_items: bool) -> None:
        (self._with_items if has_items else self._without).add(request)

    def discard(self, request: R) -> None:
        """Idempotent."""
        self._with_items.discard(request)
        self._without.discard(request)

    def admit(self, take: Callable[[R], bool]) -> Iterator[tuple[R, RequestError | None]]:
        """Removes the requests that `take` admits, or refuses by a RequestError: these, and their errors."""
        blocked = False
        while (request := self._first(with_items=not blocked)) is not None:
            error: RequestError | None = None
            try:
                if not take(request):
                    if request is self._without.first:
                        return
                    blocked = True
                    continue
            except RequestError as refusal:
                error = refusal
            self.discard(request)
            yield request, error

    def _first(self, *, with_items: bool) -> R | None:
        plain, first = self._without.first, self._with_items.first if with_items else None
        if plain is None or first is None:
            return plain or first
        return min(plain, first, key=order_of)
