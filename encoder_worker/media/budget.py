"""Bytes of media in host memory, of files that have arrived and of what is decoded, with shares by tenant."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Claim:
    nbytes: int
    tenant: str
    number: int
    granted: asyncio.Future[None]


class MediaBudget:
    """A semaphore over bytes: at most `limit`, those `beside` it included, or one item alone that is larger.

    A tenant that has something holds at most half of what the others leave, so that whoever comes finds
    room; the tenant "", which is everybody where no keys are in use, may have all. Of those who wait the
    tenant that holds least is next, and one tenant's are served in order of arrival: nothing overtakes what
    waits for the whole to become free, only what waits for its own tenant's share.

    An admitted item needs only the media threads to release it, so every wait ends.
    """

    def __init__(
        self, limit: int, beside: Callable[[], int] = lambda: 0, taken: Callable[[], None] = lambda: None
    ) -> None:
        self.nbytes = 0
        self._limit = limit
        self._beside, self._taken = beside, taken
        self._held: dict[str, int] = {}
        #: Those that come before all others, and the others by tenant.
        self._first: deque[_Claim] = deque()
        self._waiting: dict[str, deque[_Claim]] = {}
        self._numbers = itertools.count()

    async def acquire(self, nbytes: int, tenant: str = "", *, first: bool = False) -> MediaReservation:
        """Room for one item, before its first byte is read; `first` serves it before all other waiters."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        claim = _Claim(nbytes, tenant, next(self._numbers), granted)
        if first:
            self._first.appendleft(claim)
        else:
            self._waiting.setdefault(tenant, deque()).append(claim)
        self.serve()
        try:
            await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                self.release(nbytes, tenant)
            else:
                self._withdraw(claim)
                self.serve()
            raise
        return MediaReservation(self, nbytes, tenant)

    def serve(self) -> None:
        """Grants what fits now."""
        while (claim := self._next()) is not None:
            beside = self._beside() if self.nbytes else 0
            if self.nbytes and self.nbytes + beside + claim.nbytes > self._limit:
                return
            self._withdraw(claim)
            self._hold(claim.nbytes, claim.tenant)
            claim.granted.set_result(None)

    def _next(self) -> _Claim | None:
        # Cancelled ones leave the queue when their tasks run.
        for claim in self._first:
            if not claim.granted.done():
                return claim
        heads = (next((c for c in claims if not c.granted.done()), None) for claims in self._waiting.values())
        able = [claim for claim in heads if claim is not None and self._in_share(claim)]
        return min(able, key=lambda claim: (self._held.get(claim.tenant, 0), claim.number), default=None)

    def _in_share(self, claim: _Claim) -> bool:
        held = self._held.get(claim.tenant, 0)
        if not claim.tenant or not held:
            return True
        return held + claim.nbytes <= (self._limit - (self.nbytes - held) + 1) // 2

    def _withdraw(self, claim: _Claim) -> None:
        if claim in self._first:
            self._first.remove(claim)
        elif (claims := self._waiting.get(claim.tenant)) is not None and claim in claims:
            claims.remove(claim)
            if not claims:
                del self._waiting[claim.tenant]

    def _hold(self, nbytes: int, tenant: str) -> None:
        self.nbytes += nbytes
        held = self._held.get(tenant, 0) + nbytes
        if held:
            self._held[tenant] = held
        else:
            self._held.pop(tenant, None)
        if nbytes > 0:
            self._taken()

    def release(self, nbytes: int, tenant: str = "") -> None:
        """Returns bytes to the budget."""
        self._hold(-nbytes, tenant)
        self.serve()


class MediaReservation:
    """One item's share of the budget, until `release`."""

    def __init__(self, budget: MediaBudget, nbytes: int, tenant: str) -> None:
        self._budget = budget
        self._nbytes = nbytes
        self._tenant = tenant

    def release(self) -> None:
        """Returns all bytes to the budget. Idempotent."""
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._budget.release(nbytes, self._tenant)
