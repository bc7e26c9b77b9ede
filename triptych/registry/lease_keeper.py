"""Keeper of leases: renews those of items in work."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from triptych.base.log import log_fields, short
from triptych.registry.leases import Lease, Leases, OwnedBy
from triptych.store.control import StoreUnavailable

logger = logging.getLogger(__name__)


class LeaseKeeper:
    """The leases that one worker holds; lives in the event loop.

    `term` is in seconds. A lease is renewed neither past its item's deadline nor after two terms without
    progress of the tower (`last_progress`, on the monotonic clock): a hung worker's leases end.
    """

    def __init__(
        self,
        leases: Leases,
        *,
        address: str,
        incarnation: str,
        last_progress: Callable[[], float],
        term: float = 5.0,
    ) -> None:
        self._leases = leases
        self._address = address
        self._incarnation = incarnation
        self._last_progress = last_progress
        self._term = term
        self._held: dict[str, tuple[Lease, asyncio.Task[None]]] = {}
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def held(self) -> int:
        """Leases held."""
        return len(self._held)

    async def acquire(
        self, mm_hash: str, *, deadline: Callable[[], float], failed_token: str = ""
    ) -> OwnedBy | None:
        """The other live worker that holds the item's lease; None when this one may encode it.

        `failed_token` names a lease whose owner failed: it is replaced. While the store is
        down the item is encoded without a lease.
        """
        if mm_hash in self._held:
            return None
        try:
            answer = await self._acquire(mm_hash, failed_token)
            if isinstance(answer, OwnedBy) and answer.address == self._address:
                # A stale lease of this worker, or of an earlier one at this address.
                answer = await self._acquire(mm_hash, answer.token)
        except StoreUnavailable:
            logger.warning(
                "no lease for %s: the store cannot be reached",
                short(mm_hash),
                extra=log_fields(mm_hash=mm_hash),
            )
            return None
        if isinstance(answer, OwnedBy):
            return answer
        self._held[mm_hash] = answer, asyncio.create_task(self._renew(answer, deadline))
        return None

    async def _acquire(self, mm_hash: str, replace_token: str) -> Lease | OwnedBy:
        return await self._leases.acquire(
            mm_hash,
            address=self._address,
            incarnation=self._incarnation,
            term=self._term,
            replace_token=replace_token,
        )

    def drop(self, mm_hash: str) -> None:
        """Releases the item's lease, if it has one, in a background task."""
        lease, renewal = self._held.pop(mm_hash, (None, None))
        if lease is None or renewal is None:
            return
        renewal.cancel()
        release = asyncio.create_task(self._release(lease))
        self._releases.add(release)
        release.add_done_callback(self._releases.discard)

    async def close(self, timeout: float = 2.0) -> None:
        """Releases all leases."""
        for mm_hash in list(self._held):
            self.drop(mm_hash)
        if self._releases:
            await asyncio.wait(self._releases, timeout=timeout)

    async def _renew(self, lease: Lease, deadline: Callable[[], float]) -> None:
        while True:
            await asyncio.sleep(self._term / 3)
            if not self._may_renew(deadline()):
                continue
            try:
                if not await self._leases.renew(lease, self._term):
                    logger.info(
                        "the lease of %s was taken over",
                        short(lease.mm_hash),
                        extra=log_fields(mm_hash=lease.mm_hash),
                    )
                    return
            except StoreUnavailable:
                logger.info(
                    "the lease of %s could not be renewed",
                    short(lease.mm_hash),
                    extra=log_fields(mm_hash=lease.mm_hash),
                )

    def _may_renew(self, deadline: float) -> bool:
        now = time.monotonic()
        return now < deadline and now - self._last_progress() < 2 * self._term

    async def _release(self, lease: Lease) -> None:
        try:
            await self._leases.release(lease)
        except StoreUnavailable:
            logger.info(
                "the lease of %s was left to its deadline",
                short(lease.mm_hash),
                extra=log_fields(mm_hash=lease.mm_hash),
            )
