"""Admission: reserves the bytes of a request's distinct items before they are encoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from triptych.config import format_size
from triptych.errors import InvalidRequest
from triptych.types import MMFeature


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
