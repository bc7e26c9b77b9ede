"""The encoder worker's scheduler: which item to preprocess, ask for again or encode. No I/O, no tensors."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from triptych.encoder_worker.decode_places import DecodePlace, DecodePlaces


class Stage(enum.Enum):
    """The stage of an item.

    NO_MEDIA -> MEDIA -> PREPARING -> PREPARED -> ENCODING
       ^  |       ^                      |
       |  +-> REQUESTED                  |   asked for again, its room is kept
       +---------------------------------+   its pixels were dropped, or never fit
    """

    NO_MEDIA = enum.auto()
    REQUESTED = enum.auto()
    MEDIA = enum.auto()
    PREPARING = enum.auto()
    PREPARED = enum.auto()
    ENCODING = enum.auto()


@dataclass(eq=False, slots=True)
class EncoderItem:
    """The scheduling state of one item."""

    re_encode: bool = False
    #: The digest of the key that waits for it; empty where no keys are in use.
    tenant: str = ""
    #: Among that key's items: the lowest of the requests that wait for it.
    priority: int = 0
    #: Its decode may take long, and has a process of its own.
    heavy: bool = False
    #: Whether the item has been looked up in the store, its first stage; None: not begun.
    looked_up: bool | None = None
    stage: Stage = Stage.NO_MEDIA
    #: Bytes of the prepared pixels, and the item's cost in a batch; set once it is preprocessed.
    nbytes: int = 0
    cost: int = 0
    prepared_at: int | None = field(default=None, init=False)
    #: When permission to run was given; None: not yet.
    permitted_at: int | None = field(default=None, init=False)
    #: The item has one of the `tower_credit` places, so that its pixels are kept.
    placed: bool = field(default=False, init=False)

    @property
    def place(self) -> DecodePlace:
        """What it is decoded in."""
        return DecodePlace.PROCESS if self.heavy else DecodePlace.THREAD

    @property
    def planned(self) -> bool:
        """The item's plan is known."""
        return self.prepared_at is not None

    @property
    def waiting(self) -> bool:
        """The item is planned, has permission, and is not in the tower."""
        return self.planned and self.permitted_at is not None and self.stage is not Stage.ENCODING

    @property
    def has_pixels(self) -> bool:
        return self.stage is Stage.PREPARED or self.stage is Stage.ENCODING

    @property
    def pinned(self) -> bool:
        """Its pixels are kept, or their room until they are prepared again."""
        return self.placed if self.has_pixels else self.planned and self.stage is not Stage.NO_MEDIA

    @property
    def order(self) -> tuple[bool, int]:
        """Sort key: re-encodes first, then by permission."""
        return (not self.re_encode, self.permitted_at or 0)

    def drop_pixels(self) -> None:
        """Drops the prepared pixels."""
        self.stage = Stage.NO_MEDIA


@dataclass(slots=True)
class SchedulerCounts:
    """Counts of items: all, planned without permission, queued for the tower, in it or being saved."""

    items: int
    planned: int = 0
    queued: int = 0
    encoding: int = 0
    #: Bytes of prepared pixels.
    prepared_bytes: int = 0


@dataclass(eq=False, slots=True)
class Errand:
    """A file whose index is read, to divide a video; `begin` is its turn."""

    tenant: str
    begin: Callable[[], None]


Item = TypeVar("Item", bound=EncoderItem)


class EncoderScheduler(Generic[Item]):
    """The scheduler of one encoder worker. It keeps items in order of arrival and alone changes their stage.

    `prepared_memory` bounds the bytes of prepared pixels, `batch_patches` the cost of one batch,
    `preparations` the items in preprocessing at once (see `DecodePlaces`), `tower_credit` the planned items
    that wait for the tower with their pixels: proxies share it, but each has at least one, so more items may
    have permission. Those without a place wait as if they had none.

    Pixels of items without a place may be dropped at any time, the oldest first. Those of items with one
    stay: otherwise two items could evict each other for ever. Permission does not raise the memory limit: an
    item with a place asks for its media only when there is room for it, in run order. One item alone may
    always be in memory, however large.
    """

    def __init__(
        self, *, prepared_memory: int, batch_patches: int, preparations: int, tower_credit: int
    ) -> None:
        self._tower_credit = tower_credit
        self._memory = prepared_memory
        self._batch_patches = batch_patches
        self.places = DecodePlaces(preparations)
        #: Bytes of decoded media, which count towards the memory of prepared pixels.
        self.decoded_bytes: Callable[[], int] = lambda: 0
        self._errands: dict[Errand, None] = {}
        self._items: dict[Item, None] = {}
        self._clock = itertools.count(1)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def unplanned(self) -> int:
        """Items that still use plan credit."""
        return sum(not item.planned for item in self._items)

    def counts(self) -> SchedulerCounts:
        """The current counts."""
        counts = SchedulerCounts(items=len(self._items))
        for item in self._items:
            if item.has_pixels:
                counts.prepared_bytes += item.nbytes
            if item.stage is Stage.ENCODING:
                counts.encoding += 1
            elif item.prepared_at is not None:
                if item.permitted_at is None:
                    counts.planned += 1
                else:
                    counts.queued += 1
        return counts

    def waiting(self) -> list[Item]:
        """Planned items with permission that are not in the tower."""
        return [item for item in self._items if item.waiting]

    def add(self, item: Item) -> None:
        """A new item."""
        self._items[item] = None

    def remove(self, item: Item) -> None:
        """The item is encoded, failed or cancelled."""
        self._items.pop(item, None)
        self._fill_places()

    def next_look_up(self) -> Item | None:
        """The next item to look up in the store, which is done before anything else."""
        item = next((item for item in self._items if item.looked_up is None), None)
        if item is not None:
            item.looked_up = False
        return item

    def needs_media(self, item: Item) -> bool:
        """Whether the item can use media that arrive now."""
        return item.stage is Stage.REQUESTED or (item.stage is Stage.NO_MEDIA and not item.planned)

    def media_arrived(self, item: Item) -> None:
        """All media of an item that `needs_media` have arrived."""
        item.stage = Stage.MEDIA

    def media_lost(self, item: Item) -> None:
        """The stream that was asked for the media again is gone: another one may be asked."""
        if item.stage is Stage.REQUESTED:
            item.stage = Stage.NO_MEDIA

    def permit(self, item: Item) -> None:
        """Gives permission to use the tower. Idempotent."""
        if item.permitted_at is None:
            item.permitted_at = next(self._clock)
            self._fill_places()

    def withdraw(self, item: Item) -> None:
        """Takes the permission back, with the stream that gave it."""
        if item.stage is not Stage.ENCODING:
            item.permitted_at, item.placed = None, False
            self.media_lost(item)
            self._fill_places()

    def _fill_places(self) -> None:
        """Gives free places to planned items with permission: re-encodes first, then in order."""
        placed = [item for item in self._items if item.placed and item.stage is not Stage.ENCODING]
        free = self._tower_credit - len(placed)
        if free > 0:
            able = [
                item
                for item in self._items
                if item.permitted_at is not None and not item.placed and item.prepared_at is not None
            ]
            for item in sorted(able, key=lambda i: i.order)[:free]:
                item.placed = True

    def add_errand(self, errand: Errand) -> None:
        """An errand waits for its turn."""
        self._errands[errand] = None

    def drop_errand(self, errand: Errand) -> None:
        """It is over or not wanted any more; one that has begun keeps its place until `decoded`."""
        self._errands.pop(errand, None)

    def next_errand(self, now: float) -> Errand | None:
        """The errand to begin now: of the tenant with the least seconds, then by arrival."""
        able = [errand for errand in self._errands if self.places.may_begin(errand.tenant, DecodePlace.INDEX)]
        errand = min(able, key=lambda each: self.places.seconds(each.tenant, now), default=None)
        if errand is not None:
            del self._errands[errand]
            self.places.begin(errand, errand.tenant, DecodePlace.INDEX, now)
        return errand

    def next_preparation(self, now: float = 0.0) -> Item | None:
        """The item to preprocess now: re-encodes first, then of the tenant with the least seconds of
        decoding; of one tenant's, those that may run first, then by priority and arrival."""
        media = Stage.MEDIA  # one pass, which looks at many items for each decode
        #: By tenant and kind: None where there is no place, else what the tenant has had.
        served: dict[tuple[str, bool], float | None] = {}
        item: Item | None = None
        first = (True, math.inf, True, math.inf)
        for each in self._items:
            if each.stage is not media or not each.looked_up:
                continue
            kind = each.tenant, each.heavy
            if kind not in served:
                able = self.places.may_begin(each.tenant, each.place)
                served[kind] = self.places.seconds(each.tenant, now) if able else None
            if (seconds := served[kind]) is None:
                continue
            # What may run has a place in the tower's queue, which others are not to wait for.
            begins = each.priority if each.permitted_at is None else each.permitted_at
            at = (not each.re_encode, seconds, each.permitted_at is None, begins)
            if item is None or at < first:
                item, first = each, at
        if item is None:
            return None
        item.stage = Stage.PREPARING
        self.places.begin(item, item.tenant, item.place, now)
        return item

    def decoded(self, work: Item | Errand, now: float = 0.0) -> float:
        """Its thread has come to an end: the place is free, also of an item that has been removed before.

        Returns the seconds that its tenant is charged; idempotent.
        """
        return self.places.end(work, now)

    def too_heavy(self, item: Item) -> None:
        """The item turned out to be heavy when its header was read: it waits for a place of that kind."""
        item.heavy, item.stage = True, Stage.MEDIA

    def preparing(self) -> list[Item]:
        """Items that wait for their decode or are in it."""
        return [item for item in self._items if item.stage in (Stage.MEDIA, Stage.PREPARING)]

    def prepared(self, item: Item, *, nbytes: int, cost: int) -> None:
        """The item's pixels are prepared; others' or its own are dropped where memory is short."""
        self.decoded(item)
        item.stage = Stage.PREPARED
        item.nbytes, item.cost, item.prepared_at = nbytes, cost, next(self._clock)
        self._fill_places()
        self._make_room(item)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pixels that are kept, or whose room is."""
        return sum([item.nbytes for item in self._items if item.pinned])

    def shrink(self) -> None:
        """Drops pixels that need not be kept where decoded media have taken their room."""
        self._make_room(None)

    def _make_room(self, newest: Item | None) -> None:
        """Drops pixels, oldest first and the newest's own last, until held and reserved bytes fit."""
        no_media = Stage.NO_MEDIA
        holders = [i for i in self._items if i.stage is not no_media and i.prepared_at is not None]
        decoded = self.decoded_bytes()
        over = sum([item.nbytes for item in holders]) + decoded - self._memory
        if over <= 0:
            return
        others = [item for item in holders if item is not newest and not item.pinned]
        for item in sorted(others, key=lambda i: i.prepared_at or 0):
            over -= item.nbytes
            item.drop_pixels()
            if over <= 0:
                return
        alone = len(holders) - len(others) == 1
        # What is decoded gives way to pixels that are kept: it would never end to prepare these again for it.
        if newest is not None and newest.has_pixels and not alone and over > decoded:
            newest.drop_pixels()

    def next_media_request(self) -> Item | None:
        """The next planned item with a place whose pixels were dropped: its media are asked for again."""
        lacking = [item for item in self._items if item.placed and item.stage is Stage.NO_MEDIA]
        if not lacking:
            return None
        item = min(lacking, key=lambda i: i.order)
        held = self.pinned_bytes
        if held and held + item.nbytes > self._memory:
            return None
        item.stage = Stage.REQUESTED
        self._make_room(item)
        return item

    def next_batch(self) -> list[Item]:
        """The next batch: re-encodes first, then in run order, within `batch_patches`.

        An item above the limit runs alone. No later item overtakes one that does not fit, so that large
        items do not starve.
        """
        runnable = [item for item in self._items if item.placed and item.stage is Stage.PREPARED]
        batch: list[Item] = []
        cost = 0
        for item in sorted(runnable, key=lambda i: i.order):
            if batch and cost + item.cost > self._batch_patches:
                break
            batch.append(item)
            cost += item.cost
        for item in batch:
            item.stage = Stage.ENCODING
        self._fill_places()
        return batch
