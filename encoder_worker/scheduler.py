"""Which item is preprocessed, asked for again, or encoded next: decisions only, no IO, no tensors.

An item's way, by events from outside (`->`) and decisions made here (`=>`):

    add -> media_arrived => next_preparation -> prepared -> run => next_batch -> remove
                 ^                                  |         |
                 +---- media sent again <= next_media_request +   (its pixels were dropped, or never fit)

Pixels of items without permission to run may be dropped at any time, the oldest first. Those of items
with permission stay: dropping them too would let two items push each other out for ever. Permission is
no reason to hold more than the memory, so such an item asks for its media only when there is room for it,
in run order, and one item may always be in memory, however large.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(slots=True)
class _Item:
    key: str
    arrival: int
    re_encode: bool
    #: Media are here and wait for preprocessing, or are in it.
    has_media: bool = False
    preparing: bool = False
    #: Sizes are known.
    planned: bool = False
    nbytes: int = 0
    cost: int = 0
    has_pixels: bool = False
    prepared_at: int = 0
    #: When permission came; None: there is none.
    permit_order: int | None = None
    #: The same once the item has one of the tower's places: only then its pixels stay.
    run_order: int | None = None
    #: The media have been asked for again: their room is kept.
    awaited: bool = False
    in_tower: bool = False

    @property
    def order(self) -> tuple[bool, int]:
        return (not self.re_encode, self.arrival if self.permit_order is None else self.permit_order)

    @property
    def pinned(self) -> bool:
        return (self.has_pixels and self.run_order is not None) or self.awaited


class EncoderScheduler:
    """Plan queue, prepared pixels and run queue of one encoder worker.

    `prepared_memory` bounds the bytes of prepared pixels, `batch_patches` the cost of one batch,
    `preparations` the items in preprocessing at once, `tower_credit` the planned items that wait for the
    tower with their pixels: proxies divide it among themselves, but each has one at least, so more items
    may have permission. Those wait as if they had none.
    """

    def __init__(
        self, *, prepared_memory: int, batch_patches: int, preparations: int, tower_credit: int
    ) -> None:
        self._tower_credit = tower_credit
        self._memory = prepared_memory
        self._batch_patches = batch_patches
        self._preparations = preparations
        self._items: dict[str, _Item] = {}
        self._clock = itertools.count()
        self._dropped: list[str] = []

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: str) -> bool:
        return key in self._items

    @property
    def unplanned(self) -> int:
        """Items that still use plan credit."""
        return sum(not item.planned for item in self._items.values())

    @property
    def planned(self) -> int:
        """Items that are planned and have no permission to run."""
        return sum(item.planned and item.permit_order is None for item in self._items.values())

    @property
    def queued(self) -> int:
        """Items that have permission and wait for the tower."""
        return sum(
            item.planned and item.permit_order is not None and not item.in_tower
            for item in self._items.values()
        )

    @property
    def prepared_bytes(self) -> int:
        """Bytes of prepared pixels held."""
        return sum(item.nbytes for item in self._items.values() if item.has_pixels)

    def add(self, key: str, *, re_encode: bool = False) -> None:
        """A new item without media. A known one may only gain the priority of a re-encode."""
        item = self._items.get(key)
        if item is None:
            self._items[key] = _Item(key, next(self._clock), re_encode)
        else:
            item.re_encode = item.re_encode or re_encode

    def remove(self, key: str) -> None:
        """The item is encoded, failed or cancelled: nothing of it stays."""
        self._items.pop(key, None)
        self._fill_places()

    def needs_media(self, key: str) -> bool:
        """Whether media that arrive now are of use."""
        item = self._items.get(key)
        return item is not None and not item.has_media and (not item.planned or item.awaited)

    def media_arrived(self, key: str) -> None:
        """All media of an item that `needs_media` are here."""
        self._items[key].has_media = True

    def media_lost(self, key: str) -> None:
        """Media that were asked for again will not come from there: they may be asked for elsewhere."""
        item = self._items.get(key)
        if item is not None and not item.has_media:
            item.awaited = False

    def run(self, key: str) -> None:
        """Permission to use the tower. A second one changes nothing."""
        item = self._items[key]
        if item.permit_order is None:
            item.permit_order = next(self._clock)
            self._fill_places()

    def withdraw(self, key: str) -> None:
        """The permission is gone with the stream that had it."""
        item = self._items.get(key)
        if item is not None and not item.in_tower:
            item.permit_order = item.run_order = None
            item.awaited = item.awaited and item.has_media
            self._fill_places()

    def waiting(self) -> list[str]:
        """Planned items with permission that are not in the tower."""
        return [
            item.key
            for item in self._items.values()
            if item.planned and item.permit_order is not None and not item.in_tower
        ]

    def _fill_places(self) -> None:
        """Planned items with permission take the free places: re-encodes first, then in order."""
        placed = (item for item in self._items.values() if item.run_order is not None and not item.in_tower)
        free = self._tower_credit - sum(1 for _ in placed)
        if free <= 0:
            return
        able = [
            item
            for item in self._items.values()
            if item.planned and item.permit_order is not None and item.run_order is None
        ]
        for item in sorted(able, key=lambda i: i.order)[:free]:
            item.run_order = item.permit_order

    def next_preparation(self) -> str | None:
        """The item to preprocess now: re-encodes first, then those that may run, then by arrival."""
        if sum(item.preparing for item in self._items.values()) >= self._preparations:
            return None
        waiting = [item for item in self._items.values() if item.has_media and not item.preparing]
        if not waiting:
            return None
        item = min(waiting, key=lambda i: (not i.re_encode, i.permit_order is None, i.order))
        item.preparing = True
        return item.key

    def prepared(self, key: str, *, nbytes: int, cost: int) -> None:
        """The item's pixels are here. `take_dropped` says whose pixels (maybe its own) go for them."""
        item = self._items[key]
        item.has_media = item.preparing = item.awaited = False
        item.planned = item.has_pixels = True
        item.nbytes, item.cost, item.prepared_at = nbytes, cost, next(self._clock)
        self._fill_places()
        self._make_room(item)

    def take_dropped(self) -> list[str]:
        """The keys whose pixels the caller drops now."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def _make_room(self, newest: _Item) -> None:
        """Drops pixels, oldest first and the newest's own last, until held and awaited bytes fit."""
        holders = [item for item in self._items.values() if item.has_pixels or item.awaited]
        over = sum(item.nbytes for item in holders) - self._memory
        others = [item for item in holders if item is not newest and not item.pinned]
        for item in sorted(others, key=lambda i: i.prepared_at):
            if over <= 0:
                return
            over -= item.nbytes
            self._drop(item)
        alone = len(holders) - len(others) == 1
        if over > 0 and newest.has_pixels and not alone:
            self._drop(newest)

    def _drop(self, item: _Item) -> None:
        item.has_pixels = False
        self._dropped.append(item.key)

    def next_media_request(self) -> str | None:
        """A planned item whose turn it is but whose pixels are gone: ask for its media again."""
        lacking = [
            item
            for item in self._items.values()
            if item.planned
            and item.run_order is not None
            and not (item.has_pixels or item.in_tower)
            and not (item.awaited or item.has_media)
        ]
        if not lacking:
            return None
        item = min(lacking, key=lambda i: i.order)
        held = sum(other.nbytes for other in self._items.values() if other.pinned)
        if held and held + item.nbytes > self._memory:
            return None
        item.awaited = True
        self._make_room(item)
        return item.key

    def next_batch(self) -> list[str]:
        """The keys to encode together now: re-encodes first, then run order, within the patch budget.

        The first fits always: an item above the budget runs alone. No later item overtakes one that does
        not fit, so large items do not starve.
        """
        runnable = [
            item
            for item in self._items.values()
            if item.run_order is not None and item.has_pixels and not item.in_tower
        ]
        batch: list[_Item] = []
        cost = 0
        for item in sorted(runnable, key=lambda i: i.order):
            if batch and cost + item.cost > self._batch_patches:
                break
            batch.append(item)
            cost += item.cost
        for item in batch:
            item.in_tower = True
        self._fill_places()
        return [item.key for item in batch]
