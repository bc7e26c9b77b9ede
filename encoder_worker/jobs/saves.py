"""Saves of encoder outputs: begun with the output, repeated on failure, and reported to the jobs."""

from __future__ import annotations

import asyncio
import logging
import time

from triptych.base.errors import InternalError, RequestError
from triptych.base.log import short
from triptych.base.types import ItemPlan
from triptych.encoder_worker.engine import Encoded, EncoderEngine, EngineEvent, Offered, Saved
from triptych.encoder_worker.jobs.job import EncodeJob, Failed, Ready
from triptych.encoder_worker.jobs.table import EncodeJobs, JobMetrics

logger = logging.getLogger(__name__)

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
        self._saving: dict[str, EncodeJob] = {}
        #: Bytes of unfinished saves.
        self.nbytes = 0

    def on_engine(self, event: EngineEvent) -> None:
        """Handles an engine event for the item's job, if that still exists."""
        if isinstance(event, Encoded):
            if (job := self._jobs.get(event.mm_hash)) is not None:
                self._encoded(job, event)
        elif (job := self._saving.get(event.mm_hash)) is None:
            logger.debug("the engine reports a save without a job")
        elif isinstance(event, Offered):
            job.source = event.source
            job.timings.save = time.monotonic() - job.save_started
            job.answer_direct()
        elif isinstance(event, Saved):
            self._saved(job)
        else:
            log = logger.warning if job.waiters else logger.info
            log(
                "the save of %s failed (%s)",
                short(job.mm_hash),
                event.reason,
                extra=job.log_extra,
            )
            job.save_error = event.reason
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._save, job)

    def _encoded(self, job: EncodeJob, event: Encoded) -> None:
        job.timings.encode, job.timings.work = event.seconds, event.work
        job.encoded_at = time.monotonic()
        job.prepared = None
        if event.error is not None or event.output is None:
            self._jobs.end(job, _tower_failure(event.error))
            return
        job.output = event.output
        job.save_started = time.monotonic()
        self._saving[job.mm_hash] = job
        self.nbytes += event.output.plan.nbytes
        if not event.saving:
            self._save(job)

    def _saved(self, job: EncodeJob) -> None:
        plan, job.timings.save = self._end_save(job), time.monotonic() - job.save_started
        self._metrics.saved(plan.nbytes, job.timings.save)
        self._jobs.end(job, Ready(plan, False, job.timings, job.source))

    def _save(self, job: EncodeJob) -> None:
        """Saves (again) while a stream waits, which the streams' deadlines bound."""
        if job.waiters and job.output is not None:
            self._engine.save(job.output, job.damaged_digest)
        else:
            self._end_save(job)
            self._jobs.forget(job)

    def _end_save(self, job: EncodeJob) -> ItemPlan:
        del self._saving[job.mm_hash]
        assert job.output is not None
        self.nbytes -= job.output.plan.nbytes
        return job.output.plan


def _tower_failure(error: Exception | None) -> Failed:
    if isinstance(error, RequestError):
        return Failed(error, retryable=error.status >= 500)
    return Failed(InternalError("the tower failed on the item"), retryable=True)
