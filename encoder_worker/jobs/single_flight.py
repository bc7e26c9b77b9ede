"""Single flight: an item that is stored, or leased by another encoder worker, is not encoded again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from triptych.base.errors import Unavailable
from triptych.base.types import ItemPlan
from triptych.encoder_worker.jobs.job import EncodeJob, Failed, Ready
from triptych.encoder_worker.jobs.lease_keeper import LeaseKeeper
from triptych.encoder_worker.jobs.table import EncodeJobs
from triptych.registry.leases import OwnedBy
from triptych.registry.store_reach import StorePatience
from triptych.store.control import StoreUnavailable

logger = logging.getLogger(__name__)

#: Timeout of a look-up, and of a lease, in seconds.
LOOK_UP_SECONDS = 1.0


class PlanStore(Protocol):
    """The look-up of a store; see `EmbeddingStore.look_up`."""

    async def look_up(self, keys_: Sequence[tuple[str, str]], /) -> list[ItemPlan | None]: ...


class SingleFlight:
    """Leases and look-ups before the tower.

    A store that does not answer in time delays nothing further: the items are encoded.
    """

    def __init__(self, jobs: EncodeJobs, store: PlanStore, leases: LeaseKeeper, namespace: str) -> None:
        self._jobs = jobs
        self._store = store
        self._leases = leases
        self._namespace = namespace
        self._patience = StorePatience()

    async def end_stored(self, jobs: Sequence[EncodeJob]) -> None:
        """Ends the jobs whose embedding is stored, and forgets those without a waiter.

        A damaged embedding does not count: it is encoded again.
        """
        keys = [(job.mm_hash, self._namespace) for job in jobs]
        plans: list[ItemPlan | None] = [None] * len(jobs)
        try:
            async with self._asked(jobs):
                plans = await self._store.look_up(keys)
        except (StoreUnavailable, TimeoutError):
            logger.warning("the store cannot be reached: going on without looking up %d items", len(jobs))
        for job, plan in zip(jobs, plans, strict=True):
            if plan is not None and job.waiters and not job.damaged_digest:
                self._jobs.end(job, Ready(plan, True, job.timings))
        self._wanted(jobs)

    async def claim(self, jobs: Sequence[EncodeJob]) -> list[EncodeJob]:
        """The jobs that this worker is to encode, with their leases; the others have ended.

        Leases before the look-up: an owner saves before it releases, so that an item whose lease was free
        is either stored by now or encoded by nobody.
        """
        owners = await asyncio.gather(*map(self._lease, jobs))
        await self.end_stored(jobs)
        for job, owner in zip(jobs, owners, strict=True):
            if owner is not None and job.waiters:
                error = Unavailable("another encoder worker is encoding the item", retry_after=1)
                self._jobs.end(job, Failed(error, True, owner.address, owner.token))
        return self._wanted(jobs)

    async def _lease(self, job: EncodeJob) -> OwnedBy | None:
        with contextlib.suppress(TimeoutError):
            async with self._asked([job]):
                return await self._leases.acquire(
                    job.mm_hash, deadline=lambda: job.deadline, failed_token=job.failed_lease_token
                )
        return None

    def _asked(self, jobs: Sequence[EncodeJob]) -> AbstractAsyncContextManager[None]:
        """What PD workers read here is not held up by a store that does not answer."""
        direct = all(waiter.spec.direct for job in jobs for waiter in job.waiters)
        seconds = LOOK_UP_SECONDS if self._jobs.reaches_store() or not direct else 0.0
        return self._patience.asked(seconds, hurry=direct)

    def _wanted(self, jobs: Sequence[EncodeJob]) -> list[EncodeJob]:
        for job in jobs:
            if not job.waiters:
                self._jobs.forget(job)
        return [job for job in jobs if job.waiters]
