"""All jobs of one encoder worker: streams join them, the scheduler orders them, the engine runs them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from triptych.encoder_worker.engine import (
    BatchDone,
    Encoded,
    EncoderEngine,
    EngineEvent,
    Saved,
    TowerItem,
)
from triptych.encoder_worker.jobs.clearance import Clearance, LookUp
from triptych.encoder_worker.jobs.job import Failed, ItemJob, Ready, VerifiedMedia, Waiter, Waits
from triptych.encoder_worker.jobs.lease_keeper import LeaseKeeper
from triptych.encoder_worker.jobs.limits import ItemFormat, JobLimits
from triptych.encoder_worker.jobs.metrics import JobMetrics
from triptych.encoder_worker.media.budget import MediaRoom
from triptych.encoder_worker.media.preparer import Preparer
from triptych.encoder_worker.scheduler import EncoderScheduler
from triptych.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestError,
    Unavailable,
)
from triptych.log import short

logger = logging.getLogger(__name__)

#: Least time between two words to those that wait for the tower; far below a proxy's patience.
WAITS_SECONDS = 1.0


class JobTable:
    """One `ItemJob` per mm_hash; every method runs in the event loop.

    A job ends when its embedding has landed, when it fails, or when its last waiter leaves; an item that
    is in the tower then stays, waited for by nobody, until the engine has answered.
    """

    def __init__(
        self,
        *,
        format: ItemFormat,
        limits: JobLimits,
        scheduler: EncoderScheduler,
        preparer: Preparer,
        engine: EncoderEngine,
        store: LookUp,
        leases: LeaseKeeper,
        metrics: JobMetrics,
    ) -> None:
        self.format = format
        self._limits = limits
        self._scheduler = scheduler
        self._preparer = preparer
        self._engine = engine
        self._clearance = Clearance(store, leases, format.namespace, limits.look_up_seconds)
        self._leases = leases
        self._metrics = metrics
        self._jobs: dict[str, ItemJob] = {}
        self._tower_busy = False
        self._saving_bytes = 0
        self._told_waiting = 0.0
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._jobs)

    def open_jobs(self) -> list[ItemJob]:
        """The jobs that have not ended."""
        return list(self._jobs.values())

    # What the streams say.

    def join(self, waiter: Waiter) -> None:
        """The stream waits for its item from now on. Overloaded or Unavailable when it cannot."""
        spec = waiter.spec
        job = self._jobs.get(spec.mm_hash)
        self._check_room(waiter, job)
        self._scheduler.add(spec.mm_hash, re_encode=spec.re_encode)
        if job is None:
            job = self._jobs[spec.mm_hash] = ItemJob(spec.mm_hash, time.monotonic())
            self._empty.clear()
            self._spawn(self._look_up(job))
        job.waiters.append(waiter)
        if job.plan is not None:
            waiter.tell_plan(job.plan)
        self._measure()

    def _check_room(self, waiter: Waiter, job: ItemJob | None) -> None:
        if self._draining:
            raise Unavailable("this encoder worker is shutting down", retry_after=1)
        if waiter.spec.re_encode:
            return
        full = (
            self._scheduler.unplanned >= self._limits.unplanned_jobs or len(self) >= self._limits.jobs
            if job is None
            else len(job.waiters) >= self._limits.waiters_per_job
        )
        if full:
            raise Overloaded("this encoder worker has too many jobs open", retry_after=1)

    async def media(self, waiter: Waiter, frames: Sequence[bytes], room: MediaRoom) -> None:
        """All media of one stream, with their `room`, which is given back when they are preprocessed.

        InvalidRequest when they are not what the stream's key was made of.
        """
        try:
            media = await self._preparer.verify(waiter.spec, frames)
            job = self._jobs.get(waiter.spec.mm_hash)
            if job is None or waiter.ended or job.media or not self._scheduler.needs_media(job.mm_hash):
                room.release()
                return
        except BaseException:
            room.release()
            raise
        job.asked = None
        self._take_media(job, media, room)

    def _take_media(self, job: ItemJob, media: VerifiedMedia, room: MediaRoom) -> None:
        job.media, job.media_room = media, room
        if job.looked_up:
            self._scheduler.media_arrived(job.mm_hash)
            self._pump()

    def run(self, waiter: Waiter) -> None:
        """The item may use the tower."""
        job = self._jobs.get(waiter.spec.mm_hash)
        if waiter.ended or job is None:
            return
        waiter.admitted = True
        job.runnable_since = job.runnable_since or time.monotonic()
        self._scheduler.run(job.mm_hash)
        self._pump()

    def leave(self, waiter: Waiter) -> None:
        """The stream is over, whatever the reason. Idempotent."""
        waiter.ended = True
        job = self._jobs.get(waiter.spec.mm_hash)
        if job is None or waiter not in job.waiters:
            return
        job.waiters.remove(waiter)
        if job.asked is waiter:
            job.asked = None
            self._scheduler.media_lost(job.mm_hash)
        if not job.in_tower:
            if not job.waiters:
                self._forget(job)
            elif not any(w.admitted for w in job.waiters):
                job.runnable_since = 0.0
                self._scheduler.withdraw(job.mm_hash)
        self._pump()

    def no_more(self, waiter: Waiter, complete: bool) -> None:
        """The stream's sender has ended, with or without media that are still needed."""
        waiter.closed = True
        if waiter.ended:
            return
        if not complete:
            error: RequestError = InvalidRequest(
                "media_bytes: the stream ended before all media were sent", param="media_bytes"
            )
            self.fail(waiter, error, retryable=waiter.media_wanted)
        elif waiter.media_wanted:
            error = Unavailable("the item's media are needed again, and the stream had ended", retry_after=1)
            self.fail(waiter, error, retryable=True)
        elif not waiter.admitted:
            self.fail(
                waiter, InvalidRequest("run: the stream ended without it", param="run"), retryable=False
            )

    def fail(self, waiter: Waiter, error: RequestError, *, retryable: bool) -> None:
        """Ends one stream and leaves its job to the others."""
        if not waiter.ended:
            self._metrics.failed(error)
            waiter.end(Failed(error, retryable))
        self.leave(waiter)

    def fail_late(self, waiter: Waiter) -> None:
        """The stream's time is over."""
        job = self._jobs.get(waiter.spec.mm_hash)
        error: RequestError = DeadlineExceeded("the item was not encoded within the job's timeout")
        if job is not None and job.save_error:
            error = Unavailable("the embedding store is unavailable: the item could not be saved")
        self.fail(waiter, error, retryable=True)

    # Decisions of the scheduler, carried out.

    def _pump(self) -> None:
        while (key := self._scheduler.next_preparation()) is not None:
            self._spawn(self._prepare(self._jobs[key]))
        self._ask_for_lacking_media()
        for key in self._scheduler.take_dropped():
            if (job := self._jobs.get(key)) is not None:
                job.prepared = job.output = None
        if not self._tower_busy and self._saving_bytes <= self._limits.saving_bytes:
            batch = [self._jobs[key] for key in self._scheduler.next_batch()]
            if batch:
                self._tower_busy = True
                self._spawn(self._run_batch(batch))
                self._ask_for_lacking_media()  # of items that have taken the batch's places
        self._measure()

    def _ask_for_lacking_media(self) -> None:
        while (key := self._scheduler.next_media_request()) is not None:
            self._ask_for_media(self._jobs[key])

    def _ask_for_media(self, job: ItemJob) -> None:
        job.asked = next(w for w in job.waiters if w.admitted)
        if job.asked.closed:
            asyncio.get_running_loop().call_soon(self.no_more, job.asked, True)
        job.asked.want_media()

    async def _look_up(self, job: ItemJob) -> None:
        if not job.damaged_digest and (found := (await self._clearance.found([job]))[0]) is not None:
            self._end(job, found)
        if self._jobs.get(job.mm_hash) is not job:
            return
        job.looked_up = True
        kept = self._engine.kept(job.mm_hash)
        if kept is not None:
            job.output = kept
            job.drop_media()
            job.learn_plan(kept.plan)
            self._scheduler.prepared(job.mm_hash, nbytes=kept.plan.nbytes, cost=0)
        elif job.media is not None:
            self._scheduler.media_arrived(job.mm_hash)
        self._pump()

    async def _prepare(self, job: ItemJob) -> None:
        media, room = job.take_media()
        assert media is not None
        start = time.monotonic()
        try:
            prepared = await self._preparer.prepare(media)
        except RequestError as refused:
            self._end(job, Failed(refused, retryable=refused.status >= 500))
            return
        except Exception:
            logger.exception("preprocessing of %s failed", short(job.mm_hash))
            modality = self.format.modality
            error = InternalError(f"{modality}: preprocessing failed", param=modality)
            self._end(job, Failed(error, retryable=False))
            return
        finally:
            del media
            if room is not None:
                room.release()
        if self._jobs.get(job.mm_hash) is not job:
            return
        job.prepared = prepared
        job.timings.preprocess += time.monotonic() - start
        job.learn_plan(self.format.plan(job.mm_hash, prepared))
        self._scheduler.prepared(job.mm_hash, nbytes=prepared.nbytes, cost=prepared.cost)
        self._pump()

    # The way through tower and store.

    async def _run_batch(self, batch: Sequence[ItemJob]) -> None:
        for job in batch:
            job.in_tower = True
            job.timings.queue = time.monotonic() - job.runnable_since
        try:
            left = self._settle(batch, await self._clearance.found(batch))
            left = self._settle(left, await self._clearance.owned(left))
            items = [_tower_item(job) for job in left]
        except Exception:
            logger.exception("a batch could not begin")
            error = InternalError("the encoder failed before it began")
            for job in batch:
                self._end(job, Failed(error, retryable=True))
            items = []
        if items:
            self._engine.encode(items)
        else:
            self._tower_busy = False
            self._pump()

    def _settle(self, batch: Sequence[ItemJob], answers: Sequence[Ready | Failed | None]) -> list[ItemJob]:
        """Ends the jobs that have an answer and those that nobody waits for any more; the others are left."""
        left = []
        for job, answer in zip(batch, answers, strict=True):
            if not job.waiters:
                self._forget(job)
            elif answer is not None:
                self._end(job, answer)
            else:
                left.append(job)
        return left

    def on_engine(self, event: EngineEvent) -> None:
        """What the engine reports; called in the event loop."""
        if isinstance(event, BatchDone):
            self._tower_busy = False
            self._metrics.batch(event)
            self._tell_waiting()
        elif (job := self._jobs.get(event.mm_hash)) is None:
            logger.debug("the engine reports an item without a job")
        elif isinstance(event, Encoded):
            self._on_encoded(job, event)
        elif isinstance(event, Saved):
            self._on_saved(job)
        else:
            self._on_unsaved(job, event.reason)
        self._pump()

    def _tell_waiting(self) -> None:
        """The tower gets on: proxies wait on for items that have permission and no place in it."""
        now = time.monotonic()
        if now - self._told_waiting < WAITS_SECONDS:
            return
        self._told_waiting = now
        for key in self._scheduler.waiting():
            for waiter in self._jobs[key].waiters:
                if waiter.admitted and not waiter.ended:
                    waiter.send(Waits())

    def _on_encoded(self, job: ItemJob, event: Encoded) -> None:
        job.timings.encode = event.seconds
        job.prepared = None
        if event.error is not None:
            self._end(job, _tower_failure(event.error))
            return
        job.output = event.output
        if event.saving:
            self._begin_saving(job)
        else:
            self._save_again(job)

    def _begin_saving(self, job: ItemJob) -> None:
        assert job.output is not None
        job.saving, job.save_started = True, time.monotonic()
        self._saving_bytes += job.output.plan.nbytes

    def _on_saved(self, job: ItemJob) -> None:
        assert job.output is not None
        job.timings.save = time.monotonic() - job.save_started
        self._metrics.saved(job.output.plan.nbytes, job.timings.save)
        self._end(job, Ready(job.output.plan, False, job.timings))

    def _on_unsaved(self, job: ItemJob, reason: str) -> None:
        logger.warning("the save of %s did not land (%s)", short(job.mm_hash), reason)
        job.save_error = reason
        loop = asyncio.get_running_loop()
        loop.call_later(self._limits.save_retry_seconds, self._save_again, job)

    def _save_again(self, job: ItemJob) -> None:
        """Saves while somebody waits; the waiters' deadlines end it."""
        if self._jobs.get(job.mm_hash) is not job or job.output is None:
            return
        if not job.waiters:
            self._forget(job)
            self._pump()
            return
        if not job.saving:
            self._begin_saving(job)
        self._engine.save(job.output, job.damaged_digest)

    # The end of jobs.

    def _end(self, job: ItemJob, event: Ready | Failed) -> None:
        if self._jobs.get(job.mm_hash) is not job:
            return
        if isinstance(event, Failed):
            self._metrics.failed(event.error)
        elif event.already_stored:
            self._metrics.found()
        job.end(event)
        self._forget(job)
        self._pump()

    def _forget(self, job: ItemJob) -> None:
        if self._jobs.get(job.mm_hash) is not job:
            return
        del self._jobs[job.mm_hash]
        job.drop_media()
        self._scheduler.remove(job.mm_hash)
        self._leases.drop(job.mm_hash)
        if job.saving and job.output is not None:
            self._saving_bytes -= job.output.plan.nbytes
        if not self._jobs:
            self._empty.set()

    async def drain(self, grace: float) -> None:
        """Takes no new jobs, finishes those with permission, sends the others elsewhere at once."""
        self._draining = True
        error = Unavailable("this encoder worker is shutting down", retry_after=1)
        for job in list(self._jobs.values()):
            if not job.in_tower and not any(w.admitted for w in job.waiters):
                self._end(job, Failed(error, retryable=True))
        try:
            async with asyncio.timeout(grace):
                await self._empty.wait()
        except TimeoutError:
            logger.warning("%d jobs did not end in time and are sent elsewhere", len(self))
        for job in list(self._jobs.values()):
            self._end(job, Failed(error, retryable=True))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _measure(self) -> None:
        self._metrics.gauges(
            scheduler=self._scheduler,
            jobs=len(self),
            inflight=sum(job.in_tower for job in self._jobs.values()),
            leases=self._leases.held,
        )


def _tower_item(job: ItemJob) -> TowerItem:
    assert job.plan is not None
    return TowerItem(job.plan, job.prepared, job.output, job.damaged_digest, lambda: bool(job.waiters))


def _tower_failure(error: Exception) -> Failed:
    if isinstance(error, RequestError):
        return Failed(error, retryable=error.status >= 500)
    return Failed(InternalError("the tower failed on the item"), retryable=True)
