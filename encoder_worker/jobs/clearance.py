"""What is known of items before they enter the tower: whether they are stored, and who encodes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from triptych.ec_connector.registry.leases import OwnedBy
from triptych.ec_connector.store.control import StoreUnavailable
from triptych.encoder_worker.jobs.job import Failed, ItemJob, Ready
from triptych.encoder_worker.jobs.lease_keeper import LeaseKeeper
from triptych.errors import Unavailable
from triptych.types import ItemPlan

logger = logging.getLogger(__name__)


class LookUp(Protocol):
    """What is asked of the store that outputs are saved in; see `EmbeddingStore.look_up`."""

    async def look_up(self, keys_: Sequence[tuple[str, str]], /) -> list[ItemPlan | None]: ...


class Clearance:
    """Asks the store. `found` and `owned` give a job's answer, or None: it goes on.

    A store that does not answer within `look_up_seconds` holds nothing up: items are encoded all the same.
    """

    def __init__(self, store: LookUp, leases: LeaseKeeper, namespace: str, look_up_seconds: float) -> None:
        self._store = store
        self._leases = leases
        self._namespace = namespace
        self._look_up_seconds = look_up_seconds

    async def found(self, jobs: Sequence[ItemJob]) -> list[Ready | None]:
        """The answer of each job whose embedding is stored; a damaged one is to be encoded again."""
        keys = [(job.mm_hash, self._namespace) for job in jobs]
        plans: list[ItemPlan | None] = [None] * len(jobs)
        try:
            async with asyncio.timeout(self._look_up_seconds):
                plans = await self._store.look_up(keys)
        except (StoreUnavailable, TimeoutError):
            logger.warning("the store cannot be reached: going on without looking up %d items", len(jobs))
        return [
            None if plan is None or job.damaged_digest else Ready(plan, True, job.timings)
            for job, plan in zip(jobs, plans, strict=True)
        ]

    async def owned(self, jobs: Sequence[ItemJob]) -> list[Failed | None]:
        """Takes the leases; where another worker has one, the answer names it to the proxy."""
        owners = await asyncio.gather(*(self._take_lease(job) for job in jobs))
        return [None if owner is None else _encoded_by(owner) for owner in owners]

    async def _take_lease(self, job: ItemJob) -> OwnedBy | None:
        return await self._leases.take(
            job.mm_hash, deadline=lambda: job.deadline, failed_token=job.failed_lease_token
        )


def _encoded_by(owner: OwnedBy) -> Failed:
    error = Unavailable("another encoder worker is encoding the item", retry_after=1)
    return Failed(error, True, owner.address, owner.token)
