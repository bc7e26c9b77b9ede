"""Places of decodes: how many run at once, a tenant's share of them, and whose turn is next. No I/O."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

#: Tenants that are remembered without a decode under way.
_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class _Running:
    tenant: str
    heavy: bool
    since: float


class DecodePlaces:
    """The decodes under way of one encoder worker, and the seconds that each tenant has had.

    Cheap ones have a thread each, `threads` at once. Heavy ones have a process beside their thread and twice
    as many places, of which one tenant may have `threads`, the next one half of what is left, and so on: all
    cores are one tenant's while it is alone, and whoever comes finds a place.

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

    def places(self, *, heavy: bool) -> int:
        """How many decodes of a kind may run at once."""
        return self._threads * (2 if heavy else 1)

    def used(self, *, heavy: bool) -> int:
        return sum(each.heavy is heavy for each in self._running.values())

    def bound(self, tenant: str) -> int:
        """Heavy decodes that the tenant may have under way, while the others have what they have."""
        others = sum(each.heavy and each.tenant != tenant for each in self._running.values())
        return min(self._threads, (self.places(heavy=True) - others + 1) // 2)

    def may_begin(self, tenant: str, *, heavy: bool) -> bool:
        """Whether there is a place for a decode of the tenant."""
        if self.used(heavy=heavy) >= self.places(heavy=heavy):
            return False
        own = sum(each.heavy and each.tenant == tenant for each in self._running.values())
        return not heavy or own < self.bound(tenant)

    def seconds(self, tenant: str, now: float) -> float:
        """What the tenant has had: the one with the least is next."""
        running = [each.since for each in self._running.values() if each.tenant == tenant]
        had = self._seconds.get(tenant, 0.0)
        return (had if running else max(had, self._level)) + sum(now - since for since in running)

    def begin(self, decode: Hashable, tenant: str, now: float, *, heavy: bool) -> None:
        """A decode has a place from now until `end`."""
        level = self.seconds(tenant, now)
        if not any(each.tenant == tenant for each in self._running.values()):
            self._seconds[tenant] = level
        self._level = max(self._level, level)
        self._running[decode] = _Running(tenant, heavy, now)

    def end(self, decode: Hashable, now: float) -> float:
        """The place is free, and its seconds are charged to its tenant. Returns them; idempotent."""
        running = self._running.pop(decode, None)
        if running is None:
            return 0.0
        seconds = max(0.0, now - running.since)
        self._seconds[running.tenant] = self._seconds.get(running.tenant, 0.0) + seconds
        if len(self._seconds) > _REMEMBERED:
            active = {each.tenant for each in self._running.values()}
            self._seconds = {
                tenant: had for tenant, had in self._seconds.items() if tenant in active or had > self._level
            }
        return seconds
