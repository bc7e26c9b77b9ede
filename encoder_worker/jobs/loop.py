"""The event loop task of an encoder worker: carries out its scheduler's decisions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence

from triptych.base.errors import InternalError, RequestError, Unavailable
from triptych.base.log import short
from triptych.base.tracing.context import Producers
from triptych.base.types import SEGMENT
from triptych.ec_connector.base import OutputCache
from triptych.encoder_worker.engine import EncoderEngine
from triptych.encoder_worker.job_spec import ItemFormat
from triptych.encoder_worker.jobs.job import EncodeJob
from triptych.encoder_worker.jobs.same_rows import SameRows
from triptych.encoder_worker.jobs.single_flight import JobSaves, SingleFlight
from triptych.encoder_worker.jobs.table import EncodeJobs, JobMetrics, JobStreams
from triptych.encoder_worker.media.budget import MediaBudget
from triptych.encoder_worker.media.preparer import Preparer
from triptych.encoder_worker.media.work import Abandoned, TooHeavy
from triptych.encoder_worker.scheduler import EncoderScheduler
from triptych.protos import job_events
from triptych.protos.encoder_pb2 import EncodeEvent


class BackgroundTasks:
    """A set of running tasks, which keeps references to them and can cancel them all."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> None:
        """Starts a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def cancel(self) -> None:
        """Cancels all tasks and waits for their ends."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


logger = logging.getLogger(__name__)

#: Least seconds between two `waits` to a proxy, far below the proxy's timeout for them.
WAITS_SECONDS = 1.0
#: Seconds between two `waits` for jobs that wait for their decode or are in it, likewise.
DECODING_SECONDS = 10.0
#: The tower pauses while saves of more bytes are under way.
SAVING_BYTES = 256 << 20


class JobLoop:
    """Looks jobs up, preprocesses their media, asks for media again, and hands batches to the engine."""

    def __init__(
        self,
        jobs: EncodeJobs,
        scheduler: EncoderScheduler[EncodeJob],
        streams: JobStreams,
        single_flight: SingleFlight,
        preparer: Preparer,
        engine: EncoderEngine,
        outputs: OutputCache,
        saves: JobSaves,
        *,
        format: ItemFormat,
        metrics: JobMetrics,
        changed: asyncio.Event,
        producers: Producers | None = None,
        same_rows: SameRows | None = None,
        decoded: MediaBudget | None = None,
    ) -> None:
        self._decoded = decoded
        self._same_rows = same_rows
        self._jobs = jobs
        self._scheduler = scheduler
        self._streams = streams
        self._single_flight = single_flight
        self._preparer = preparer
        self._engine = engine
        self._outputs = outputs
        self._saves = saves
        self._format = format
        self._metrics = metrics
        self._changed = changed
        self._producers = producers
        self._tower_busy = False
        self._waits_sent = 0.0
        self._tasks = BackgroundTasks()

    def start(self) -> None:
        """Starts the loop."""
        self._tasks.start(self._run())
        self._tasks.start(self._keep_alive())

    async def stop(self) -> None:
        """Cancels the loop and the tasks that it has started."""
        await self._tasks.cancel()

    async def _run(self) -> None:
        scheduler = self._scheduler
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                while (job := scheduler.next_look_up()) is not None:
                    self._tasks.start(self._look_up(job))
                while (errand := scheduler.next_errand(time.monotonic())) is not None:
                    errand.begin()
                while (job := scheduler.next_preparation(time.monotonic())) is not None:
                    self._tasks.start(self._prepare(job))
                while (job := scheduler.next_media_request()) is not None:
                    self._streams.request_media(job)
                may_save = self._saves.nbytes <= SAVING_BYTES
                if not self._tower_busy and may_save and (batch := scheduler.next_batch()):
                    self._tower_busy = True
                    self._tasks.start(self._encode(batch))
                    self._changed.set()  # for the items that now have the places of the batch
                if self._decoded is not None:
                    self._decoded.serve()  # pixels that were kept may have gone
                self._metrics.gauges(scheduler.counts())
                self._metrics.places(scheduler.places)
            except Exception:
                logger.exception("a decision of the encoder's scheduler could not be carried out")

    async def _look_up(self, job: EncodeJob) -> None:
        if not job.damaged_digest:
            await self._single_flight.end_stored([job])
        if job.ended:
            return
        job.looked_up = True
        kept = self._outputs.get(job.mm_hash)
        if kept is not None:
            job.output = kept
            job.drop_media()
            job.set_plan(kept.plan)
            self._scheduler.prepared(job, nbytes=kept.plan.nbytes, cost=0)
        self._changed.set()

    async def _keep_alive(self) -> None:
        """Tells the proxies of jobs without a plan that decoders work: each decode has a deadline."""
        while True:
            await asyncio.sleep(DECODING_SECONDS)
            for job in self._scheduler.preparing():
                job.send_waits()

    async def _prepare(self, job: EncodeJob) -> None:
        media, reservation = job.pop_media()
        assert media is not None
        segment = SEGMENT in media.options
        start = job.prepare_started = time.monotonic()
        place = job.place
        decode = job.decode = self._preparer.work(tenant=job.tenant, heavy=job.heavy)
        try:
            prepared = await self._preparer.prepare(media, decode, job.clip)
            plan = self._format.plan(job.mm_hash, prepared)
        except TooHeavy:
            if not job.ended:
                # It keeps its room, and waits for a place where its decode can be ended.
                job.media, job.media_reservation, reservation = media, reservation, None
                self._scheduler.too_heavy(job)
            return
        except Exception as error:
            self._jobs.end(job, self._refused(job, error))
            return
        finally:
            del media
            job.decode = None
            if job.media is None:
                job.drop_clip()
            if reservation is not None:
                reservation.release()
            self._metrics.decoded(self._scheduler.decoded(job, time.monotonic()), place)
            if decode.cancelled:
                self._metrics.abandoned()
            self._changed.set()
        if job.ended:
            return
        job.prepared = prepared
        job.ready.preprocess_seconds += time.monotonic() - start
        job.set_plan(plan)
        if segment and self._same_rows is not None and job.waiters and self._jobs.reaches_store():
            job.output = await self._same_rows.output(plan, prepared, job.waiters[0].spec.salt)
        if not job.ended:
            cost = prepared.cost if job.output is None else 0
            self._scheduler.prepared(job, nbytes=prepared.nbytes, cost=cost)
        self._changed.set()

    def _refused(self, job: EncodeJob, error: Exception) -> EncodeEvent:
        if isinstance(error, Abandoned):
            ended = Unavailable("the item's decode was ended", retry_after=1)
            return job_events.failed(ended, retryable=True)
        if isinstance(error, RequestError):
            return job_events.failed(error, retryable=error.status >= 500)
        logger.error("preprocessing of %s failed", short(job.mm_hash), exc_info=error, extra=job.log_extra)
        modality = self._format.modality
        bug = InternalError(f"{modality}: preprocessing failed", param=modality)
        return job_events.failed(bug, retryable=False)

    async def _encode(self, batch: Sequence[EncodeJob]) -> None:
        for job in batch:
            job.ready.queue_seconds = time.monotonic() - job.queued_since
        try:
            jobs = await self._single_flight.claim(batch)
            if self._producers is not None:
                self._note_producers(jobs, self._producers)
            items = list(map(EncodeJob.tower_item, jobs))
            if items:
                await asyncio.wrap_future(self._engine.encode(items))
                if time.monotonic() - self._waits_sent >= WAITS_SECONDS:
                    self._waits_sent = time.monotonic()
                    for job in self._scheduler.waiting():
                        job.send_waits()
        except Exception:
            logger.exception("a batch could not begin")
            error = InternalError("the encoder failed before the item's batch began")
            for job in batch:
                self._jobs.end(job, job_events.failed(error, retryable=True))
        finally:
            self._tower_busy = False
            self._changed.set()

    def _note_producers(self, jobs: Sequence[EncodeJob], producers: Producers) -> None:
        for job in jobs:
            if job.trace is not None:
                job.trace.encoding(job, producers)
            elif job.output is None:
                producers.note(job.mm_hash, b"")  # nobody records who computes it now
