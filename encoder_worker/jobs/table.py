"""The table of an encoder worker's jobs by mm_hash, and the streams of proxies that join them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.base.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestError, Unavailable
from triptych.base.metrics import EncoderMetrics
from triptych.encoder_worker.decode_places import DecodePlace, DecodePlaces
from triptych.encoder_worker.job_spec import JobSpec
from triptych.encoder_worker.jobs.job import EncodeJob, JobTrace, StreamTrace, Waiter
from triptych.encoder_worker.media.budget import MediaReservation
from triptych.encoder_worker.media.preparer import Preparer
from triptych.encoder_worker.scheduler import EncoderScheduler, SchedulerCounts, Stage
from triptych.protos.encoder_pb2 import EncodeEvent
from triptych.protos.job_events import failed
from triptych.registry.lease_keeper import LeaseKeeper


class JobMetrics:
    """Gauges of jobs and pixels held; counters of batches, saves and failures."""

    def __init__(self, metrics: EncoderMetrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name
        # Looked up once: they are set with every turn of the job loop.
        self._seconds = {
            place: metrics.decode_seconds.labels(model_name, place.value) for place in DecodePlace
        }
        self._places = {place: metrics.decodes.labels(model_name, place.value) for place in DecodePlace}

    def gauges(self, counts: SchedulerCounts) -> None:
        """Sets the gauges; all are zero when the worker is idle."""
        self._metrics.jobs.set(counts.items)
        self._metrics.planned_items.set(counts.planned)
        self._metrics.queue_items.set(counts.queued)
        self._metrics.inflight.set(counts.encoding)
        self._metrics.prepared_bytes.set(counts.prepared_bytes)

    def batch(self, items: int, calls: int, seconds: float) -> None:
        """Counts a finished batch, unless all its outputs were kept from earlier jobs. From any thread."""
        self._metrics.tower_calls.inc(calls)
        self._metrics.tower_items.inc(items)
        if items:
            self._metrics.batch_items.observe(items)
            self._metrics.encode_seconds.observe(seconds)

    def saved(self, nbytes: int, seconds: float) -> None:
        """Counts a save that has completed."""
        self._metrics.save_bytes.inc(nbytes)
        self._metrics.save_seconds.observe(seconds)

    def already_stored(self) -> None:
        """Counts a job whose embedding was in the store already."""
        self._metrics.already_stored.inc()

    def decoded(self, seconds: float, place: DecodePlace) -> None:
        """Counts a decode that has ended, for whatever reason."""
        self._seconds[place].inc(seconds)

    def abandoned(self) -> None:
        """Counts a decode that was ended since nobody waited for it any more."""
        self._metrics.decodes_abandoned.inc()

    def places(self, places: DecodePlaces) -> None:
        """Sets the gauges of decodes under way."""
        for place, gauge in self._places.items():
            gauge.set(places.used(place))

    def failed(self, code: str) -> None:
        """Counts a failed job or stream, by its error's code."""
        self._metrics.failures.labels(self._model_name, code).inc()


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JobBounds:
    """Hard limits on jobs; the proxies' credit stays well below them.

    Jobs without a plan are limited by credit. Planned jobs hold little memory and wait for admission, which
    may need the plans of further items: refusing those would deadlock requests that are planned in part.
    """

    unplanned_jobs: int
    jobs: int = 16384
    waiters_per_job: int = 256


class EncodeJobs:
    """One `EncodeJob` per mm_hash; used in one event loop. `changed` is set when a job ends.

    A job ends when its embedding is saved, when it fails, or when its last waiter leaves. If the item is in
    the tower then, the job stays without a waiter until the engine reports it.
    """

    def __init__(
        self,
        bounds: JobBounds,
        scheduler: EncoderScheduler[EncodeJob],
        leases: LeaseKeeper,
        metrics: JobMetrics,
        changed: asyncio.Event,
    ) -> None:
        self._bounds = bounds
        self._scheduler = scheduler
        self._leases = leases
        self._metrics = metrics
        self._changed = changed
        self._jobs: dict[str, EncodeJob] = {}
        self._draining = False
        #: Whether an embedding could be saved now, as far as is known.
        self.reaches_store: Callable[[], bool] = lambda: True
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._jobs)

    def open_jobs(self) -> list[EncodeJob]:
        """The jobs that have not ended."""
        return list(self._jobs.values())

    def get(self, mm_hash: str) -> EncodeJob | None:
        """The item's job."""
        return self._jobs.get(mm_hash)

    def open(self, spec: JobSpec) -> EncodeJob:
        """The item's job, or a new one. Raises Overloaded or Unavailable when the stream cannot join."""
        job = self._jobs.get(spec.mm_hash)
        self._check_room(spec, job)
        if job is None:
            job = self._jobs[spec.mm_hash] = EncodeJob(
                mm_hash=spec.mm_hash,
                started=time.monotonic(),
                tenant=spec.tenant,
                priority=spec.priority,
                heavy=spec.modality == "video",
            )
            self._scheduler.add(job)
            self._empty.clear()
        job.re_encode = job.re_encode or spec.re_encode
        job.priority = min(job.priority, spec.priority)
        return job

    def _check_room(self, spec: JobSpec, job: EncodeJob | None) -> None:
        if self._draining:
            raise Unavailable("this encoder worker is shutting down", retry_after=1)
        if not self.reaches_store() and not spec.direct:
            raise _unreachable()
        if spec.re_encode:
            return
        full = (
            self._scheduler.unplanned >= self._bounds.unplanned_jobs or len(self) >= self._bounds.jobs
            if job is None
            else len(job.waiters) >= self._bounds.waiters_per_job
        )
        if full:
            raise Overloaded("this encoder worker has too many jobs open", retry_after=1)

    def end(self, job: EncodeJob, event: EncodeEvent) -> None:
        """Ends the job: sends `event`, `ready` or `failed`, to all its streams. Idempotent."""
        if job.ended:
            return
        if event.HasField("failed"):
            self._metrics.failed(event.failed.error.code)
        elif event.ready.already_stored:
            self._metrics.already_stored()
        job.end(event)
        self.forget(job)

    def forget(self, job: EncodeJob) -> None:
        """Ends a job without streams. Idempotent."""
        if job.ended:
            return
        job.ended = True
        if job.trace is not None:
            job.trace.end(job)
        del self._jobs[job.mm_hash]
        job.drop_media()
        job.end_decode()
        self._scheduler.remove(job)
        self._leases.drop(job.mm_hash)
        self._changed.set()
        if not self._jobs:
            self._empty.set()

    def fail_all(self) -> None:
        """Fails the jobs that need the store as retryable: this worker does not reach it, another one may."""
        for job in self.open_jobs():
            # Without a waiter it is in the tower, or its save is under way: it ends with that.
            if not job.waiters or any(waiter.spec.direct for waiter in job.waiters):
                continue
            self.end(job, failed(_unreachable(), retryable=True))

    async def drain(self, grace: float) -> None:
        """Refuses new jobs, finishes those with permission, fails the others at once as retryable."""
        self._draining = True
        leaves = failed(Unavailable("this encoder worker is shutting down", retry_after=1), retryable=True)
        for job in self.open_jobs():
            if job.stage is not Stage.ENCODING and not job.permitted:
                self.end(job, leaves)
        try:
            async with asyncio.timeout(grace):
                await self._empty.wait()
        except TimeoutError:
            logger.warning("%d jobs did not end in time and fail as retryable", len(self))
        for job in self.open_jobs():
            self.end(job, leaves)


def _unreachable() -> Unavailable:
    return Unavailable("this encoder worker does not reach the embedding store", retry_after=1)


class JobStreams:
    """Operations of streams on jobs, in the event loop. `changed` is set when the scheduler has work."""

    def __init__(
        self,
        jobs: EncodeJobs,
        scheduler: EncoderScheduler[EncodeJob],
        preparer: Preparer,
        metrics: JobMetrics,
        changed: asyncio.Event,
    ) -> None:
        self._jobs = jobs
        self._scheduler = scheduler
        self._preparer = preparer
        self._metrics = metrics
        self._changed = changed

    def join(
        self, spec: JobSpec, send: Callable[[EncodeEvent], None], trace: StreamTrace | None = None
    ) -> Waiter:
        """Adds a stream to its item's job. Raises Overloaded or Unavailable when it cannot join."""
        job = self._jobs.open(spec)
        waiter = Waiter(spec, job, time.monotonic() + spec.timeout, send, trace=trace)
        if trace is not None and trace.recording and job.trace is None:
            job.trace = JobTrace(trace)
        job.waiters.append(waiter)
        if job.plan is not None:
            waiter.send_plan()
        self._changed.set()
        return waiter

    async def media(self, waiter: Waiter, frames: Sequence[bytes], reservation: MediaReservation) -> None:
        """Takes all media of one stream; their `reservation` is released when they are preprocessed.

        InvalidRequest when their hash is not the stream's mm_hash.
        """
        job = waiter.job
        try:
            media = None if waiter.ended else await self._preparer.verify(waiter.spec, frames)
        except BaseException:
            reservation.release()
            raise
        if waiter.ended or not self._scheduler.needs_media(job):
            reservation.release()
            return
        job.media, job.media_reservation, job.media_sender = media, reservation, None
        if media is not None:
            job.drop_clip()
            job.clip = self._preparer.hold(media)
        self._scheduler.media_arrived(job)
        self._changed.set()

    def permit(self, waiter: Waiter) -> None:
        """Gives the stream's item permission to use the tower."""
        if waiter.ended:
            return
        waiter.permitted = True
        waiter.job.queued_since = waiter.job.queued_since or time.monotonic()
        self._scheduler.permit(waiter.job)
        waiter.job.answer_direct()
        self._changed.set()

    def leave(self, waiter: Waiter) -> None:
        """Removes a stream that has ended, for any reason. Idempotent."""
        waiter.ended = True
        waiter.end_trace(None)
        job = waiter.job
        if waiter not in job.waiters:
            return
        job.waiters.remove(waiter)
        if job.media_sender is waiter:
            job.media_sender = None
            self._scheduler.media_lost(job)
        if job.stage is not Stage.ENCODING:
            if not job.waiters:
                self._jobs.forget(job)
            else:
                job.tenant = job.waiters[0].spec.tenant
                if not job.permitted:
                    job.queued_since = 0.0
                    self._scheduler.withdraw(job)
        self._changed.set()

    def request_media(self, job: EncodeJob) -> None:
        """Asks a stream with permission to send the media again; fails one that is half-closed."""
        waiter = job.media_sender = next(w for w in job.waiters if w.permitted)
        waiter.want_media()
        if waiter.closed:
            self.close(waiter, complete=True)

    def close(self, waiter: Waiter, complete: bool) -> None:
        """Handles a half-closed stream; `complete` says that all its media had arrived."""
        waiter.closed = True
        error: RequestError
        if not complete:
            text = "media_bytes: the stream ended before all media were sent"
            error = InvalidRequest(text, param="media_bytes")
            self.fail(waiter, error, retryable=waiter.media_needed)
        elif waiter.media_needed:
            error = Unavailable(
                "the item's media are needed again, but the stream is half-closed", retry_after=1
            )
            self.fail(waiter, error, retryable=True)
        elif not waiter.permitted:
            error = InvalidRequest("run: the stream ended before permission to run was sent", param="run")
            self.fail(waiter, error, retryable=False)

    def fail(self, waiter: Waiter, error: RequestError, *, retryable: bool) -> None:
        """Ends one stream and leaves its job to the other streams."""
        if not waiter.ended:
            self._metrics.failed(error.code)
            waiter.end(failed(error, retryable=retryable))
        self.leave(waiter)

    def fail_late(self, waiter: Waiter) -> None:
        """Ends a stream whose deadline has passed."""
        error: RequestError = DeadlineExceeded("the item was not encoded within the job's timeout")
        if waiter.job.save_error:
            error = Unavailable("the embedding store is unavailable: the item could not be saved")
        self.fail(waiter, error, retryable=True)
