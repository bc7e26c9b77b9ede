"""Turns between tenants by least service, by arrival inside one, and whether there are several now."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Collection, Iterable
from operator import itemgetter
from typing import Generic, TypeVar

T = TypeVar("T")

#: Tenants that are remembered without a need: those whose service is no more than a new one begins with.
_IDLE_TENANTS = 64
#: Tenants that are remembered at most, those with most service, and at times as many more.
_REMEMBERED = 256


class LeastService:
    """The service that each tenant has had, in any unit: the one with the least is next.

    Start-time fair queueing: whose work comes counts as served no less than the tenant that was next last, so
    that nobody collects a claim while idle; what it has had above that is remembered. An empty name is a
    tenant like any other.
    """

    def __init__(self) -> None:
        self._service: dict[str, float] = {}
        #: What the tenant that was next last had had then.
        self._now = 0.0

    def rest(self) -> None:
        """Forgets all service, since nobody waits: the next tenants begin equal."""
        self._service.clear()
        self._now = 0.0

    def of(self, tenant: str) -> float:
        return self._service.get(tenant, self._now)

    def enter(self, tenant: str, served: Iterable[str] = ()) -> None:
        """Work of the tenant has come; `served` are those that are being served meanwhile."""
        self._now = max(self._now, min(map(self.of, served), default=self._now))
        self._service[tenant] = max(self.of(tenant), self._now)
        if len(self._service) > _IDLE_TENANTS:
            self._service = {name: had for name, had in self._service.items() if had > self._now}
        if len(self._service) > 2 * _REMEMBERED:
            most = sorted(self._service, key=self.of)[-_REMEMBERED:]
            self._service = {name: self._service[name] for name in most}

    def charge(self, tenant: str, service: float) -> None:
        """The tenant has had so much more."""
        had = self._service
        had[tenant] = had.get(tenant, self._now) + service

    def next(self, tenants: Iterable[str]) -> str:
        """The one of them that has had least, the first of equals; its work begins."""
        tenant = min(tenants, key=self.of)
        self.begin(tenant)
        return tenant

    def begin(self, tenant: str) -> None:
        """Work of the tenant begins."""
        self._now = max(self._now, self.of(tenant))


class TurnQueue(Generic[T]):
    """Things that wait, each for a turn of its tenant, which has those of lower priority first."""

    def __init__(self) -> None:
        self._service = LeastService()
        #: By tenant, with the priority, in order.
        self._waiting: dict[str, list[tuple[int, T]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def put(self, tenant: str, thing: T, priority: int = 0) -> None:
        if not self._waiting:
            self._service.rest()
        if tenant not in self._waiting:
            self._waiting[tenant] = []
            self._service.enter(tenant)
        insort(self._waiting[tenant], (priority, thing), key=itemgetter(0))

    @property
    def tenants(self) -> Collection[str]:
        """Those that have something here."""
        return self._waiting.keys()

    def take(self, tenants: Iterable[str] | None = None) -> tuple[str, T]:
        """The next one, of all or of these tenants, and its tenant, which is to be charged for it."""
        tenant = self._service.next(self._waiting if tenants is None else tenants)
        things = self._waiting[tenant]
        _, thing = things.pop(0)
        if not things:
            del self._waiting[tenant]
        return tenant, thing

    def charge(self, tenant: str, service: float) -> None:
        self._service.charge(tenant, service)


#: A client that asks now and then is not forgotten between two of its requests.
RECENT_SECONDS = 10.0


class RecentHolders:
    """Says whether several holders share something now: then it is cut fine, so that nobody waits for long.

    What is cut fine costs more in all, which one holder alone need not pay.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: str | None = None
        self._shared_until: float | None = None

    def note(self, holder: str) -> None:
        """The holder asks now."""
        if holder != self._last:
            if self._last is not None:
                self._shared_until = self._clock() + RECENT_SECONDS
            self._last = holder

    @property
    def several(self) -> bool:
        """Whether the holder has changed in the last seconds; with one alone without a look at the clock."""
        if self._shared_until is not None and self._clock() >= self._shared_until:
            self._shared_until = None
        return self._shared_until is not None
