"""Encode streams of proxies and their jobs: a stream joins a job, sends media and permission, leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from triptych.base.errors import DeadlineExceeded, InvalidRequest, RequestError, Unavailable
from triptych.encoder_worker.job_spec import JobSpec
from triptych.encoder_worker.jobs.job import EncodeJob, Failed, JobEvent, JobTrace, StreamTrace, Waiter
from triptych.encoder_worker.jobs.table import EncodeJobs, JobMetrics
from triptych.encoder_worker.media.preparer import MediaRoom, Preparer
from triptych.encoder_worker.scheduler import EncoderScheduler, Stage


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
        self, spec: JobSpec, send: Callable[[JobEvent], None], trace: StreamTrace | None = None
    ) -> Waiter:
        """Adds a stream to its item's job. Raises Overloaded or Unavailable when it cannot join."""
        job = self._jobs.open(spec)
        waiter = Waiter(spec, job, time.monotonic() + spec.timeout, send, trace=trace)
        if trace is not None and trace.recording and job.trace is None:
            job.trace = JobTrace(trace)
        job.waiters.append(waiter)
        if job.plan is not None:
            waiter.send_plan(job.plan)
        self._changed.set()
        return waiter

    async def media(self, waiter: Waiter, frames: Sequence[bytes], room: MediaRoom) -> None:
        """Takes all media of one stream, with their `room`, which is released when they are preprocessed.

        InvalidRequest when their hash is not the stream's mm_hash.
        """
        job = waiter.job
        try:
            media = None if waiter.ended else await self._preparer.verify(waiter.spec, frames)
        except BaseException:
            room.release()
            raise
        if waiter.ended or not self._scheduler.needs_media(job):
            room.release()
            return
        job.media, job.media_room, job.media_sender = media, room, None
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
            elif not job.permitted:
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
            self.fail(waiter, error, retryable=waiter.media_wanted)
        elif waiter.media_wanted:
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
            self._metrics.failed(error)
            waiter.end(Failed(error, retryable))
        self.leave(waiter)

    def fail_late(self, waiter: Waiter) -> None:
        """Ends a stream whose deadline has passed."""
        error: RequestError = DeadlineExceeded("the item was not encoded within the job's timeout")
        if waiter.job.save_error:
            error = Unavailable("the embedding store is unavailable: the item could not be saved")
        self.fail(waiter, error, retryable=True)
