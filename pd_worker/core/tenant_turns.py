"""Whose request is next in an engine: turns between tenants by the tokens that each has had. Pure values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from triptych.base.least_service import LeastService


class TenantTurns:
    """Tenants that have nothing in the batch come first; then the one with the least service.

    Service is counted in tokens, computed and put out. A tenant that comes, or comes back, counts as served
    no less than those that are served meanwhile. An engine with one tenant has nothing to decide here, and
    pays for no decision.
    """

    def __init__(self) -> None:
        self._service = LeastService()
        #: Unfinished requests, and those of them in the batch.
        self._here = Counter[str]()
        self._running = Counter[str]()
        #: Whether more than one tenant has requests here. An attribute, as every chunk asks.
        self.several = False
        #: The tenant that sits this step out.
        self.resting: str | None = None

    def add(self, tenant: str) -> None:
        """One more request of the tenant is here."""
        if self.several or tenant not in self._here:
            known = tenant in self._here
            self._service.enter(tenant, () if known else list(self._here))
        self._here[tenant] += 1
        self.several = len(self._here) > 1

    def remove(self, tenant: str) -> None:
        """One of its requests has ended."""
        _take_one(self._here, tenant)
        self.several = len(self._here) > 1
        if not self._here:
            self._service.rest()

    def start(self, tenant: str) -> None:
        """One of its requests enters the batch."""
        self._service.begin(tenant)
        self._running[tenant] += 1

    def stop(self, tenant: str) -> None:
        """One of its requests has left the batch."""
        _take_one(self._running, tenant)

    def charge(self, tenant: str, tokens: int) -> None:
        self._service.charge(tenant, tokens)

    def charge_only(self, tokens: int) -> None:
        """A whole step, where one tenant alone is here: whoever has been here before has that much less."""
        if not self.several:
            for tenant in self._here:
                self._service.charge(tenant, tokens)

    def running(self, tenant: str) -> int:
        """Its requests in the batch."""
        return self._running.get(tenant, 0)

    def precedes(self, tenant: str, other: str) -> bool:
        """Whether a start of the first is due before more of a begun prompt of the second."""
        service = self._service
        return tenant != other and (not self.running(tenant) or service.of(tenant) < service.of(other))

    def next(self, tenants: Collection[str], held: str | None = None) -> str:
        """The next of these tenants. One whose turn is `held`, since there was no room, comes before others
        that are like it."""
        without = [tenant for tenant in tenants if not self.running(tenant)]
        left = without or tenants
        if held is not None and held in left:
            return held
        return min(left, key=self._key)

    def least(self, tenants: Iterable[str]) -> str:
        """The one of these, which are in the batch, with the least service."""
        return min(tenants, key=self._service.of)

    def richest(self) -> str | None:
        """The tenant with the most requests in the batch, where one has more than one: it gives way first."""
        if not self._running:
            return None
        tenant, count = max(self._running.items(), key=lambda entry: (entry[1], self._service.of(entry[0])))
        return tenant if count > 1 else None

    def waiting(self) -> int:
        """Tenants that have requests here, and none in the batch."""
        return len(self._here) - len(self._running)

    def _key(self, tenant: str) -> tuple[float, int]:
        return self._service.of(tenant), self._here[tenant]


def _take_one(counts: Counter[str], tenant: str) -> None:
    counts[tenant] -= 1
    if counts[tenant] <= 0:
        del counts[tenant]
