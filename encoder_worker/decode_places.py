"""Places of decodes: how many run at once, a tenant's share of them, and whose turn is next. No I/O."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass

#: Tenants whose seconds are remembered, and at times as many more.
_REMEMBERED = 256


class DecodePlace(enum.Enum):
    """What a decode runs in."""

    #: A thread, for what is cheap: nothing can end it.
    THREAD = "thread"
    #: A process of its own beside its thread, for what may take long.
    PROCESS = "process"
    #: The same, for work that reads a file's index and decodes nothing.
    INDEX = "index"


@dataclass(frozen=True, slots=True)
class _Running:
    tenant: str
    place: DecodePlace
    since: float


class DecodePlaces:
    """The decodes under way of one encoder worker, and the seconds that each tenant has had.

    There are `threads` places of threads, and twice as many of each kind of process, of which one tenant may
    have `threads`, the next one half of what is left, and so on: all cores are one tenant's while it is
    alone, and whoever comes finds a place.

    The tenant with the least seconds is next, those of decodes under way included. One that comes, or comes
    again, begins at the level of the last one that was served: time without decodes saves nothing up.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._running: dict[Hashable, _Running] = {}
        self._seconds: dict[str, float] = {}
        self._level = 0.0

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
        return sum(each.place is place for each in self._running.values())

    def bound(self, tenant: str, place: DecodePlace) -> int:
        """Places of a kind that the tenant may have, while the others have what they have."""
        if place is DecodePlace.THREAD:
            return self._threads
        others = self.used(place) - self._own(tenant, place)
        return min(self._threads, (self.capacity(place) - others + 1) // 2)

    def may_begin(self, tenant: str, place: DecodePlace) -> bool:
        """Whether there is a place for a decode of the tenant."""
        free = self.used(place) < self.capacity(place)
        return free and self._own(tenant, place) < self.bound(tenant, place)

    def _own(self, tenant: str, place: DecodePlace) -> int:
        return sum(each.place is place and each.tenant == tenant for each in self._running.values())

    def seconds(self, tenant: str, now: float) -> float:
        """What the tenant has had: the one with the least is next."""
        running = [each.since for each in self._running.values() if each.tenant == tenant]
        had = self._seconds.get(tenant, 0.0)
        return (had if running else max(had, self._level)) + sum(now - since for since in running)

    def begin(self, decode: Hashable, tenant: str, place: DecodePlace, now: float) -> None:
        """A decode has a place from now until `end`."""
        level = self.seconds(tenant, now)
        if not any(each.tenant == tenant for each in self._running.values()):
            self._seconds[tenant] = level
        self._level = max(self._level, level)
        self._running[decode] = _Running(tenant, place, now)

    def end(self, decode: Hashable, now: float) -> float:
        """The place is free, and its seconds are charged to its tenant. Returns them; idempotent."""
        running = self._running.pop(decode, None)
        if running is None:
            return 0.0
        seconds = max(0.0, now - running.since)
        self._seconds[running.tenant] = self._seconds.get(running.tenant, 0.0) + seconds
        if len(self._seconds) > 2 * _REMEMBERED:
            self._forget()
        return seconds

    def _forget(self) -> None:
        """Keeps the tenants that are above the level most, and those with a decode under way."""
        active = {each.tenant for each in self._running.values()}
        most = sorted(self._seconds, key=lambda tenant: (tenant in active, self._seconds[tenant]))
        self._seconds = {tenant: self._seconds[tenant] for tenant in most[-max(_REMEMBERED, len(active)) :]}
