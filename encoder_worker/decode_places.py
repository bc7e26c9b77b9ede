"""Places of decodes: how many run at once, a tenant's share of them, and whose turn is next. No I/O."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass

from triptych.base.least_service import LeastService


class DecodePlace(enum.Enum):
    """What a decode runs in."""

    #: A thread, for what is cheap: nothing can end it.
    THREAD = "thread"
    #: A process of its own beside its thread, for what may take long.
    PROCESS = "process"
    #: The same, for work that reads a file's index and decodes nothing.
    INDEX = "index"


@dataclass(slots=True)
class _Running:
    tenant: str
    place: DecodePlace
    since: float
    #: Up to when its seconds are charged to its tenant.
    charged: float


class DecodePlaces:
    """The decodes under way of one encoder worker, and the seconds that each tenant has had.

    There are `threads` places of threads, and twice as many of each kind of process, of which one tenant may
    have `threads`, the next one half of what is left, and so on: all cores are one tenant's while it is
    alone, and whoever comes finds a place.

    The tenant with the least seconds is next, those of decodes under way included.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._running: dict[Hashable, _Running] = {}
        #: Of the decodes under way those in threads: small pictures ask for their number again and again.
        self._in_threads = 0
        self._service = LeastService()

    def __len__(self) -> int:
        return len(self._running)

    def capacity(self, place: DecodePlace) -> int:
        """How many decodes of a kind may run at once."""
        return self._threads * (1 if place is DecodePlace.THREAD else 2)

    @property
    def total(self) -> int:
        """How many of all kinds may run at once."""
        return sum(map(self.capacity, DecodePlace))

    def used(self, place: DecodePlace) -> int:
        if place is DecodePlace.THREAD:
            return self._in_threads
        return sum(each.place is place for each in self._running.values())

    def bound(self, tenant: str, place: DecodePlace) -> int:
        """Places of a kind that the tenant may have, while the others have what they have."""
        if place is DecodePlace.THREAD:
            return self._threads
        others = self.used(place) - self._own(tenant, place)
        return min(self._threads, (self.capacity(place) - others + 1) // 2)

    def may_begin(self, tenant: str, place: DecodePlace) -> bool:
        """Whether there is a place for a decode of the tenant."""
        if place is DecodePlace.THREAD:
            return self._in_threads < self._threads  # all of them may be one tenant's
        free = self.used(place) < self.capacity(place)
        return free and self._own(tenant, place) < self.bound(tenant, place)

    def _own(self, tenant: str, place: DecodePlace) -> int:
        return sum(each.place is place and each.tenant == tenant for each in self._running.values())

    def seconds(self, tenant: str, now: float) -> float:
        """What the tenant has had: the one with the least is next."""
        self._charge_all(tenant, now)
        return self._service.of(tenant)

    def begin(self, decode: Hashable, tenant: str, place: DecodePlace, now: float) -> None:
        """A decode has a place from now until `end`."""
        if not self._charge_all(tenant, now):
            self._service.enter(tenant)
        self._service.begin(tenant)
        self._running[decode] = _Running(tenant, place, now, now)
        self._in_threads += place is DecodePlace.THREAD

    def end(self, decode: Hashable, now: float) -> float:
        """The place is free, and its seconds are charged to its tenant. Returns them; idempotent."""
        running = self._running.pop(decode, None)
        if running is None:
            return 0.0
        self._in_threads -= running.place is DecodePlace.THREAD
        self._charge(running, now)
        return running.charged - running.since

    def _charge_all(self, tenant: str, now: float) -> bool:
        """Charges every decode under way; whether one of them is the tenant's."""
        known = False
        for each in self._running.values():
            if now > each.charged:
                self._charge(each, now)
            if each.tenant == tenant:
                known = True
        return known

    def _charge(self, running: _Running, now: float) -> None:
        if now > running.charged:
            self._service.charge(running.tenant, now - running.charged)
            running.charged = now
