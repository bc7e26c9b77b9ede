"""Jobs and the store: an item that is stored or leased is not encoded again; outputs are saved."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from triptych.base.errors import InternalError, RequestError, Unavailable
from triptych.base.log import short
from triptych.base.types import ItemPlan
from triptych.encoder_worker.engine import Encoded, EncoderEngine
from triptych.encoder_worker.jobs.job import EncodeJob
from triptych.encoder_worker.jobs.table import EncodeJobs, JobMetrics
from triptych.protos import job_events
from triptych.protos.convert import plan_to_proto
from triptych.protos.encoder_pb2 import EncodeEvent
from triptych.registry.lease_keeper import LeaseKeeper
from triptych.registry.leases import OwnedBy
from triptych.registry.registry import StorePatience
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
                job.ready.plan.CopyFrom(plan_to_proto(plan))
                job.ready.already_stored = True
                self._jobs.end(job, EncodeEvent(ready=job.ready))
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
                taken = job_events.failed(
                    error, retryable=True, owner_address=owner.address, owner_token=owner.token
                )
                self._jobs.end(job, taken)
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


#: Seconds between two attempts at a save.
RETRY_SECONDS = 0.5


class JobSaves:
    """Ends jobs when their embedding is saved, and streams when PD workers can read it here.

    A failed save is repeated while a stream waits.

    Used in one event loop.
    """

    def __init__(self, jobs: EncodeJobs, engine: EncoderEngine, metrics: JobMetrics) -> None:
        self._jobs = jobs
        self._engine = engine
        self._metrics = metrics
        #: With the plan, which a job may lose that has followed another one.
        self._saving: dict[str, tuple[EncodeJob, ItemPlan]] = {}
        #: Bytes of unfinished saves.
        self.nbytes = 0

    def on_engine(self, mm_hash: str, event: Encoded | EncodeEvent) -> None:
        """Handles an engine event for the item's job, if that still exists."""
        if isinstance(event, Encoded):
            if (job := self._jobs.get(mm_hash)) is not None:
                self._encoded(job, event)
        elif (job := self._job_of(mm_hash)) is None:
            logger.debug("the engine reports a save without a job")
        elif event.ready.HasField("source"):
            job.ready.source.CopyFrom(event.ready.source)
            job.ready.save_seconds = time.monotonic() - job.save_started
            job.answer_direct()
        elif event.HasField("ready"):
            self._saved(job)
        else:
            job.save_error = event.failed.error.message
            log = logger.warning if job.waiters else logger.info
            log(
                "the save of %s failed (%s)",
                short(job.mm_hash),
                job.save_error,
                extra=job.log_extra,
            )
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._save, job)

    def _encoded(self, job: EncodeJob, event: Encoded) -> None:
        job.ready.encode_seconds, job.ready.work_seconds = event.seconds, event.work
        job.encoded_at = time.monotonic()
        job.prepared = None
        if event.error is not None or event.output is None:
            self._jobs.end(job, _tower_failure(event.error))
            return
        job.output = event.output
        job.save_started = time.monotonic()
        if job.mm_hash in self._saving:
            # Of a job that has failed: the end of its save, which may still be under way, is this one's.
            self._end_save(job.mm_hash)
        self._saving[job.mm_hash] = job, event.output.plan
        self.nbytes += event.output.plan.nbytes
        if not event.saving:
            self._save(job)

    def _saved(self, job: EncodeJob) -> None:
        plan, job.ready.save_seconds = self._end_save(job.mm_hash), time.monotonic() - job.save_started
        self._metrics.saved(plan.nbytes, job.ready.save_seconds)
        self._jobs.end(job, EncodeEvent(ready=job.ready))

    def _save(self, job: EncodeJob) -> None:
        """Saves (again) while a stream waits, which the streams' deadlines bound."""
        if self._job_of(job.mm_hash) is not job:
            return  # its save has ended meanwhile, or is another job's
        if job.waiters and job.output is not None:
            self._engine.save(job.output, job.damaged_digest)
        else:
            self._end_save(job.mm_hash)
            self._jobs.forget(job)

    def _job_of(self, mm_hash: str) -> EncodeJob | None:
        """The job whose save is under way, or is to be repeated."""
        job, _ = self._saving.get(mm_hash, (None, None))
        return job

    def _end_save(self, mm_hash: str) -> ItemPlan:
        _, plan = self._saving.pop(mm_hash)
        self.nbytes -= plan.nbytes
        return plan


def _tower_failure(error: Exception | None) -> EncodeEvent:
    if isinstance(error, RequestError):
        return job_events.failed(error, retryable=error.status >= 500)
    return job_events.failed(InternalError("the tower failed on the item"), retryable=True)
