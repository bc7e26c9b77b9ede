"""The record of a multimodal item: all that the scheduler knows of it, by its mm_hash."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from triptych.base.types import ItemPlan

#: How long a ready mark counts, in seconds.
MARK_SECONDS = 10.0


class ItemStatus(enum.Enum):
    """What a request knows of an item's embedding."""

    #: It is being encoded.
    PENDING = enum.auto()
    #: Nobody encodes it, as far as is known, until it is reported missing.
    UNENCODED = enum.auto()
    #: It is stored, and the connector has not had the ready mark yet.
    STORED = enum.auto()
    #: The connector has had the ready mark, or a host copy.
    MARKED = enum.auto()
    #: Reported to the proxy as missing; it has not come back since.
    LOST = enum.auto()


@dataclass(eq=False, slots=True)
class ItemUse:
    """One request's use of an item, however often the item occurs in its prompt."""

    plan: ItemPlan
    status: ItemStatus
    #: An ItemLoaded event has named it since it was last missing.
    loaded: bool = False
    #: The item's indices in the request whose last row is neither consumed nor covered by a prefix hit.
    unconsumed: set[int] = field(default_factory=set)

    def lose(self) -> bool:
        """It is missing; whether that has to be reported."""
        if self.status is ItemStatus.LOST:
            return False
        self.status, self.loaded = ItemStatus.LOST, False
        return True

    def arrive(self) -> None:
        """An ItemLoaded event names it."""
        self.loaded = True
        if self.status is ItemStatus.LOST:
            self.status = ItemStatus.MARKED

    def put_off(self) -> None:
        """Its request gives its room up before the first row is used: what is known of the item stays."""
        if self.status is ItemStatus.MARKED:
            self.status = ItemStatus.STORED

    def load_again(self) -> None:
        """Its host copy may be gone: the connector is to have the ready mark once more."""
        if self.status in (ItemStatus.PENDING, ItemStatus.MARKED):
            self.status = ItemStatus.STORED


@dataclass(eq=False, slots=True)
class CrossTable:
    """A cross table in KV blocks, in use by `holders` (request ids)."""

    plan: ItemPlan
    blocks: tuple[int, ...]
    ready: bool
    #: Its blocks can be found by their digests.
    labelled: bool = False
    holders: set[str] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class SwappedTable:
    """A cross table in host blocks; it may be read once its copy is confirmed (`written`)."""

    plan: ItemPlan
    blocks: tuple[int, ...]
    written: bool = False


@dataclass(eq=False, slots=True)
class ItemState:
    """What is known of one item, for all requests."""

    mm_hash: str
    #: Its requests by (proxy id, request id), in the order in which they came.
    uses: dict[tuple[str, str], ItemUse] = field(default_factory=dict)
    table: CrossTable | None = None
    swapped: SwappedTable | None = None
    #: Its cross table existed at the last step.
    had_table: bool = False


class ItemTable:
    """The items of requests and cross tables, and the keys whose embeddings were stored in the last seconds.

    A ready mark may overtake the submission of a request that has the item as pending. Only recent marks
    matter: older ones are dropped.
    """

    def __init__(self) -> None:
        self._items: dict[str, ItemState] = {}
        #: When each key's latest ready mark came, the oldest first.
        self._marks: dict[str, float] = {}

    def __len__(self) -> int:
        """Items and marks that are kept."""
        return len(self._items.keys() | self._marks.keys())

    def __iter__(self) -> Iterator[ItemState]:
        return iter(self._items.values())

    def get(self, mm_hash: str) -> ItemState:
        """The item's record; an empty one, which is not kept, where nothing is known of the item."""
        return self._items.get(mm_hash) or ItemState(mm_hash)

    def add(self, mm_hash: str) -> ItemState:
        """The item's record, which is kept until `drop_unused`."""
        return self._items.setdefault(mm_hash, self.get(mm_hash))

    def drop_unused(self, item: ItemState) -> None:
        """Removes the record unless something is still known of the item."""
        if not item.uses and item.table is None and item.swapped is None:
            self._items.pop(item.mm_hash, None)

    def mark(self, mm_hashes: Iterable[str], now: float) -> None:
        """These embeddings are in the store: counts for requests that have them or come shortly after."""
        marks = self._marks
        for key in mm_hashes:
            marks.pop(key, None)
            marks[key] = now
            for use in self.get(key).uses.values():
                use.status = ItemStatus.STORED
        while marks and not self.is_marked(oldest := next(iter(marks)), now):
            del marks[oldest]

    def unmark(self, mm_hash: str) -> None:
        """The embedding is not in the store any more."""
        self._marks.pop(mm_hash, None)

    def is_marked(self, mm_hash: str, now: float) -> bool:
        """Whether a ready mark of the key counts now."""
        at = self._marks.get(mm_hash)
        return at is not None and at > now - MARK_SECONDS
