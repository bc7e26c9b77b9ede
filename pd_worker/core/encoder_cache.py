"""The encoder cache, sized in bytes: an entry is READY only once the worker role has committed it.

Bookkeeping without tensors: the worker role's map follows `drain_evicted` and the reserved loads.
"""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from dataclasses import dataclass, field

from triptych.base.types import ItemPlan

#: A request (by its id inside this worker) and the index of one of its items.
Holder = tuple[str, int]


class Residency(enum.Enum):
    """The answer to `acquire`."""

    #: Resident; the holder has a reference.
    READY = enum.auto()
    #: Its bytes are being loaded; the holder has a reference.
    PENDING = enum.auto()
    #: Not resident, and there is room for it. No reference.
    ABSENT = enum.auto()
    #: Not resident, and all entries are in use. No reference.
    NO_SPACE = enum.auto()
    #: Larger than the cache. No reference.
    TOO_BIG = enum.auto()


@dataclass(slots=True)
class _CachedItem:
    plan: ItemPlan
    nbytes: int
    deadline: float
    ready: bool = False
    holders: set[Holder] = field(default_factory=set)


class EncoderCache:
    """ABSENT --reserve--> PENDING --commit--> READY --eviction--> ABSENT; `fail` takes PENDING back.

    An entry without references stays until its bytes are needed, least recently used first. PENDING
    entries are never evicted; they fail at their deadline.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used = 0
        self._entries: dict[str, _CachedItem] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._idle_bytes = 0
        self._held: dict[str, dict[int, str]] = {}
        #: In the order of their eviction.
        self._evicted: dict[str, None] = {}
        self._references = 0
        #: (deadline, key) of PENDING entries; those out of date are dropped when they come to the top.
        self._deadlines: list[tuple[float, str]] = []

    @property
    def used(self) -> int:
        """Bytes of all entries, PENDING ones included."""
        return self._used

    @property
    def references(self) -> int:
        return self._references

    def state(self, key: str) -> Residency:
        """READY, PENDING or ABSENT, without taking a reference."""
        entry = self._entries.get(key)
        if entry is None:
            return Residency.ABSENT
        return Residency.READY if entry.ready else Residency.PENDING

    def plan_of(self, key: str) -> ItemPlan | None:
        """The plan of a READY entry, which matches the header in the store."""
        entry = self._entries.get(key)
        return entry.plan if entry is not None and entry.ready else None

    def acquire(self, holder: Holder, item: ItemPlan) -> Residency:
        """Takes a reference where the item is READY or PENDING. Idempotent."""
        entry = self._entries.get(item.mm_hash)
        if entry is not None:
            self._add_reference(holder, item.mm_hash, entry)
            return Residency.READY if entry.ready else Residency.PENDING
        if item.nbytes > self.capacity:
            return Residency.TOO_BIG
        return Residency.ABSENT if self._fits(item.nbytes) else Residency.NO_SPACE

    def reserve(self, holder: Holder, item: ItemPlan, deadline: float) -> bool:
        """ABSENT to PENDING, evicting entries without references; False when it is not ABSENT or has no room.

        Past `deadline` (the caller's clock) `expire` takes the entry back.
        """
        key = item.mm_hash
        if key in self._entries or not self._fits(item.nbytes):
            return False
        while self.capacity - self._used < item.nbytes:
            self._evict(next(iter(self._idle)))
        # An earlier entry's eviction must not reach the worker role after the new bytes.
        self._evicted.pop(key, None)
        entry = self._entries[key] = _CachedItem(item, item.nbytes, deadline)
        heapq.heappush(self._deadlines, (deadline, key))
        self._used += item.nbytes
        self._add_reference(holder, key, entry)
        return True

    def commit(self, key: str) -> None:
        """PENDING to READY: the worker has the bytes. A key without an entry is evicted from the worker."""
        entry = self._entries.get(key)
        if entry is None:
            self._evicted[key] = None
            return
        if not entry.ready:
            entry.ready = True
            if not entry.holders:
                self._make_idle(key, entry)

    def fail(self, key: str) -> None:
        """PENDING to ABSENT: the load has failed; all references are dropped."""
        entry = self._entries.get(key)
        if entry is None or entry.ready:
            return
        for request_id, index in entry.holders:
            self._drop_held(request_id, index)
        del self._entries[key]
        self._used -= entry.nbytes

    def expire(self, now: float) -> list[str]:
        """Fails PENDING entries past their deadline; their keys, which are evicted from the worker too."""
        late: list[str] = []
        while self._deadlines and self._deadlines[0][0] < now:
            deadline, key = heapq.heappop(self._deadlines)
            entry = self._entries.get(key)
            if entry is not None and not entry.ready and entry.deadline == deadline:
                self.fail(key)
                self._evicted[key] = None
                late.append(key)
        return late

    def release(self, holder: Holder) -> None:
        """Drops the holder's reference. Idempotent."""
        key = self._held.get(holder[0], {}).get(holder[1])
        if key is None:
            return
        self._drop_held(*holder)
        entry = self._entries[key]
        entry.holders.discard(holder)
        if entry.ready and not entry.holders:
            self._make_idle(key, entry)

    def release_request(self, request_id: str) -> None:
        """Drops all references of a request. Idempotent."""
        for index in list(self._held.get(request_id, ())):
            self.release((request_id, index))

    def evict_idle(self) -> None:
        """Evicts all entries without references."""
        for key in list(self._idle):
            self._evict(key)

    def drain_evicted(self) -> list[str]:
        """Keys that the worker has to drop; never one that is READY or PENDING."""
        evicted, self._evicted = list(self._evicted), {}
        return evicted

    def _fits(self, nbytes: int) -> bool:
        return nbytes <= self.capacity - self._used + self._idle_bytes

    def _add_reference(self, holder: Holder, key: str, entry: _CachedItem) -> None:
        entry.holders.add(holder)
        held = self._held.setdefault(holder[0], {})
        self._references += holder[1] not in held
        held[holder[1]] = key
        if key in self._idle:
            del self._idle[key]
            self._idle_bytes -= entry.nbytes

    def _make_idle(self, key: str, entry: _CachedItem) -> None:
        if key not in self._idle:
            self._idle[key] = None
            self._idle_bytes += entry.nbytes

    def _evict(self, key: str) -> None:
        entry = self._entries.pop(key)
        del self._idle[key]
        self._idle_bytes -= entry.nbytes
        self._used -= entry.nbytes
        self._evicted[key] = None

    def _drop_held(self, request_id: str, index: int) -> None:
        items = self._held.get(request_id, {})
        self._references -= items.pop(index, None) is not None
        if not items:
            self._held.pop(request_id, None)
