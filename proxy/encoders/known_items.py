"""Table of items: all that one proxy knows of each, for all its requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from triptych.base.types import ItemPlan
from triptych.proxy.encoders.job import EncoderJob
from triptych.proxy.events import JobEvent

#: Plans that are remembered, a plan with stretches for as many more: about 2.5 MiB. The keys and values of so
#: many pictures are more than what PD workers hold.
REMEMBERED = 4096


@dataclass(eq=False, slots=True)
class ItemRecord:
    """All that is known of one item."""

    mm_hash: str
    job: EncoderJob | None = None
    #: Its bytes, while they are in a tower or in the store and no PD worker has loaded them.
    published: int = 0
    #: Requests that have still to load them.
    loaders: set[str] | None = None
    #: As it was last seen; the key decides all of it.
    plan: ItemPlan | None = None
    #: How its last job ended, and when.
    ready: JobEvent | None = None
    ready_at: float = 0.0


class KnownItems:
    """The items that have a job, that requests have still to load, or that were seen lately.

    Of the last ones those used least recently are forgotten.
    """

    def __init__(self, capacity: int = REMEMBERED) -> None:
        self._items: dict[str, ItemRecord] = {}
        self._capacity = capacity
        #: Those with a plan, the least recently used first.
        self._remembered: dict[ItemRecord, None] = {}
        self._size = 0
        #: What each request has still to load.
        self._loads: dict[str, set[ItemRecord]] = {}
        #: Bytes that count against the proxy's share.
        self.published_bytes = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def loaders(self) -> Iterable[str]:
        """Requests that have items to load whose bytes count."""
        return self._loads

    def job(self, mm_hash: str) -> EncoderJob | None:
        item = self._items.get(mm_hash)
        return None if item is None else item.job

    def add_job(self, job: EncoderJob) -> None:
        self._add(job.mm_hash).job = job

    def remove_job(self, job: EncoderJob) -> None:
        item = self._items[job.mm_hash]
        item.job = None
        self._drop_unused(item)

    def plan(self, mm_hash: str) -> ItemPlan | None:
        """The item's plan, where it was seen lately."""
        item = self._items.get(mm_hash)
        return None if item is None else item.plan

    def learn(self, plan: ItemPlan) -> ItemRecord:
        """The plan is the most recently used one now."""
        item = self._add(plan.mm_hash)
        self._unlist(item)
        item.plan = plan
        self._remembered[item] = None
        self._size += _size(plan)
        while self._size > self._capacity:
            oldest = next(iter(self._remembered))
            self._unlist(oldest)
            oldest.plan = oldest.ready = None
            self._drop_unused(oldest)
        return item

    def store(self, plan: ItemPlan, end: JobEvent, now: float) -> None:
        """The item's job has ended: its embedding is in the store as of now."""
        item = self.learn(plan)
        item.ready, item.ready_at = end, now

    def stored_since(self, mm_hash: str, moment: float) -> JobEvent | None:
        """How the item's last job ended, if that was at `moment` or later: a look-up may not have seen it."""
        item = self._items.get(mm_hash)
        return item.ready if item is not None and item.ready_at >= moment else None

    def publish(self, mm_hash: str, nbytes: int, requests: Iterable[str]) -> None:
        """The item's bytes count from now on; those that count already stay as they are."""
        item = self._add(mm_hash)
        if item.loaders is None:
            item.published, item.loaders = nbytes, set()
            self.published_bytes += nbytes
            for request_id in requests:
                self.join(mm_hash, request_id)

    def join(self, mm_hash: str, request_id: str) -> None:
        """The request, too, has still to load the item, whose bytes count."""
        item = self._items[mm_hash]
        assert item.loaders is not None
        item.loaders.add(request_id)
        self._loads.setdefault(request_id, set()).add(item)

    def loads(self, mm_hash: str, request_id: str) -> bool:
        """Whether the request has still to load the item."""
        item = self._items.get(mm_hash)
        return item is not None and item.loaders is not None and request_id in item.loaders

    def leave(self, mm_hash: str, request_id: str) -> None:
        """The request loads the item no more; its bytes go on counting."""
        self._leave(self._items[mm_hash], request_id)

    def free(self, mm_hash: str) -> None:
        """The item's bytes count no more. Idempotent."""
        item = self._items.get(mm_hash)
        if item is not None and item.loaders is not None:
            for request_id in list(item.loaders):
                self._leave(item, request_id)
            self.published_bytes -= item.published
            item.published, item.loaders = 0, None
            self._drop_unused(item)

    def free_unheld(self, mm_hash: str) -> None:
        """The item's bytes count no more where no request has still to load them."""
        item = self._items.get(mm_hash)
        if item is not None and not item.loaders:
            self.free(mm_hash)

    def end(self, request_id: str) -> None:
        """The request loads nothing more."""
        for item in list(self._loads.get(request_id, ())):
            self._leave(item, request_id)
            self.free_unheld(item.mm_hash)

    def _add(self, mm_hash: str) -> ItemRecord:
        item = self._items.get(mm_hash)
        if item is None:
            item = self._items[mm_hash] = ItemRecord(mm_hash)
        return item

    def _leave(self, item: ItemRecord, request_id: str) -> None:
        if item.loaders is not None:
            item.loaders.discard(request_id)
        loads = self._loads[request_id]
        loads.discard(item)
        if not loads:
            del self._loads[request_id]

    def _unlist(self, item: ItemRecord) -> None:
        if item in self._remembered and item.plan is not None:
            del self._remembered[item]
            self._size -= _size(item.plan)

    def _drop_unused(self, item: ItemRecord) -> None:
        if item.job is None and item.loaders is None and item.plan is None:
            del self._items[item.mm_hash]


def _size(plan: ItemPlan) -> int:
    return 1 + len(plan.runs or ())
