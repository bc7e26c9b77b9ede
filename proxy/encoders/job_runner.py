"""Runner of encoder jobs: opens a stream per try as the job table decides, and reports to the requests."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from grpc import StatusCode, aio

from triptych.base.errors import InternalError, InvalidRequest, TriptychError, Unavailable
from triptych.base.hashing import tenant_digest
from triptych.base.log import log_fields, short
from triptych.base.metrics import ProxyMetrics
from triptych.base.types import ItemPlan
from triptych.protos import encoder_pb2, job_events
from triptych.protos.convert import plan_from_proto
from triptych.protos.encoder_pb2 import EncodeEvent, JobFailed
from triptych.proxy.encoders.arrivals import Arrivals
from triptych.proxy.encoders.job import EncoderJob, EncoderSlot, ItemSource, JobState
from triptych.proxy.encoders.job_table import EncoderJobTable
from triptych.proxy.encoders.loads import tower_patches
from triptych.proxy.encoders.work_model import WorkModel
from triptych.proxy.events import JobEvent, StoreEpoch
from triptych.proxy.ports import JobStream, RequestEvents, Transport
from triptych.proxy.routing import MAX_LOSSES
from triptych.proxy.workers import KnownWorkers
from triptych.registry.matching import WHOLE_REQUESTS

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.2
#: Tries after which an item that makes workers fail is answered with their error.
MAX_INTERNAL_ERRORS = 4
DEFAULT_CREDIT = 8
#: How a stream ends whose worker has ended.
_BROKEN = (StatusCode.UNAVAILABLE, StatusCode.UNKNOWN)
#: Seconds in which the items that leave an encoder are counted for one line of the log.
_LOG_AFTER = 0.1


@dataclass(slots=True)
class _Try:
    job: EncoderJob
    stream: JobStream
    task: asyncio.Task[None]


class JobRunner:
    """The encoder jobs of one proxy.

    `on_arrival` is called for every new item that no cache has, `on_ready` for every job that has ended with
    its item in the store, whose epoch is `epoch()` then. Where the PD workers are idle (`pd_idle`) an item
    alone is encoded while one of them reads its prompt: there will be memory for it.
    """

    def __init__(
        self,
        pool: KnownWorkers,
        metrics: ProxyMetrics,
        transport: Transport,
        events: RequestEvents,
        clock: Callable[[], float],
        *,
        share: int = 1 << 30,
        flow_control: bool = True,
        shared: Callable[[], bool] = lambda: True,
        epoch: Callable[[], StoreEpoch] = lambda: ("", 0),
        on_ready: Callable[[JobEvent], None] = lambda end: None,
        pd_idle: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model = WorkModel()
        self.arrived = Arrivals()
        #: Called with the model whose encoders a new job is for.
        self.on_arrival: Callable[[str], None] = lambda model: None
        self._epoch, self._on_ready, self._pd_idle = epoch, on_ready, pd_idle
        self.table = EncoderJobTable(
            share, tower_patches, self.model, flow_control=flow_control, shared=shared
        )
        self._pool = pool
        self._metrics = metrics
        self._transport = transport
        self._events = events
        self._clock = clock
        self.items = self.table.items
        self._tries: dict[str, _Try] = {}
        #: Of the tries, and of those that have ended and close their streams.
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.TimerHandle | None = None
        #: Items that left an encoder, by its address and the reason, and are not in the log yet.
        self._unlogged: Counter[tuple[str, str]] = Counter()
        self.table.set_encoders(self._slots())
        # Read when the metrics are: every event changes them.
        metrics.published_bytes.set_function(lambda: self.table.published_bytes)
        metrics.waiting_items.set_function(lambda: self.table.waiting + pool.unbound.total())

    async def close(self) -> None:
        if self._ticker:
            self._ticker.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for job in self.table.jobs():
            _unpin(job)

    def start(self, source: ItemSource, *, re_encode: bool = False, damaged_digest: str = "") -> float | None:
        """Has the item encoded for the request: seconds of tower time expected of the new job; None when the
        request joined a job that was there."""
        if not re_encode and self._published_since(source):
            return None
        job, joined = self.table.want(
            source.mm_hash,
            source.request_id,
            source.namespace,
            tenant=source.tenant,
            model=self._pool.encoded_by(source.namespace, source.model),
            deadline=source.deadline,
            priority=source.priority,
            re_encode=re_encode,
            damaged_digest=damaged_digest,
        )
        if job.source is None or job.source.deadline < source.deadline:
            source.media.retain()  # the job may outlive the request that brought its media
            _unpin(job)
            job.source = source
        work = None
        if not joined:
            self._metrics.encoder_jobs.labels("re_encode" if re_encode else "first").inc()
            work = self.model.work(tower_patches(job.plan) if job.plan is not None else None)
            if not re_encode:
                self.arrived.of(job.model).add(job, self._clock())
                self.on_arrival(job.model)
        if job.plan is not None:
            self._deliver_soon(source, _of(job, job_events.planned(job.plan)))
        if self._ticker is None:
            self._start_ticker()
        self._begin(self.table.pump(self._clock()))
        return work

    def _published_since(self, source: ItemSource) -> bool:
        """Whether the item has landed after the request's look-up began; then it is ready now."""
        end = self.items.stored_since(source.mm_hash, source.looked_up)
        if end is None:
            return False
        self._deliver_soon(source, end)
        return True

    def _deliver_soon(self, source: ItemSource, event: JobEvent) -> None:
        asyncio.get_running_loop().call_soon(self._events.deliver, source.request_id, event)

    def admit(self, request_id: str) -> None:
        """A PD worker has reserved memory for all items of the request: its jobs may run."""
        self.table.admit(request_id)
        self._begin(self.table.pump(self._clock()))

    def loaded(self, request_id: str, mm_hash: str) -> None:
        """The request's PD worker has the item, or found it missing: its bytes leave the share."""
        self.table.loaded(request_id, mm_hash)
        self._begin(self.table.pump(self._clock()))

    def end_attempt(self, request_id: str) -> None:
        """The request's memory at its PD worker is released."""
        self.table.end_attempt(request_id)

    def set_share(self, nbytes: int) -> None:
        """Bytes that may be published and not loaded at any time."""
        self.table.share = nbytes

    def leave(self, request_id: str) -> None:
        """The request has ended; jobs without another waiter are cancelled."""
        for job in self.table.leave(request_id):
            self._drop(job)
        self._begin(self.table.pump(self._clock()))

    def pool_changed(self) -> None:
        """The encoders, or the number of proxies that share them, have changed."""
        self.table.set_encoders(self._slots())
        self.table.whole_requests = any(
            worker.info.capacity.get(WHOLE_REQUESTS) for worker in self._pool.serving("pd")
        )
        for address in self._pool.silent("encoder"):
            self._end_tries(address, ended=False)
        for try_id in self.table.spread(self._clock()):
            if entry := self._tries.get(try_id):
                self._forget(try_id, entry)
        self._begin(self.table.pump(self._clock()))

    def _begin(self, jobs: Iterable[EncoderJob]) -> None:
        """Starts what the table lets start after an event."""
        for job in jobs:
            if job.state is JobState.PLANNING:
                self._open(job)
            elif entry := self._tries.get(job.try_id):
                entry.stream.run()

    def _tick(self) -> None:
        """Repeated while there are jobs, since some wait for their time."""
        self._ticker = None
        if len(self.table):
            self._start_ticker()
        self._begin(self.table.pump(self._clock()))

    def _start_ticker(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(TICK_SECONDS, self._tick)

    def lose(self, address: str) -> None:
        """The encoder has gone or stalled: its jobs go elsewhere."""
        self.table.set_encoders(self._slots())
        self._end_tries(address, ended=True)
        self._begin(self.table.pump(self._clock()))

    def _end_tries(self, address: str, *, ended: bool) -> None:
        """The encoder has gone; or it is silent, which says nothing about the items that it has."""
        for try_id, entry in list(self._tries.items()):
            if entry.job.address == address:
                self._forget(try_id, entry)
                if ended:
                    self._broken(try_id, entry.job, entry.stream, "the encoder worker does not answer")
                else:
                    self._retry(entry.job, try_id, "the encoder worker is silent")

    def _slots(self) -> list[EncoderSlot]:
        proxies = self._pool.proxies
        return [
            EncoderSlot(
                worker.info.address,
                worker.info.namespaces,
                max(worker.info.capacity.get("plan_credit", DEFAULT_CREDIT) // proxies, 1),
                max(worker.info.capacity.get("tower_credit", DEFAULT_CREDIT) // proxies, 1),
                worker.info.cost_kind,
            )
            for worker in self._pool.reaching("encoder")
        ]

    def _open(self, job: EncoderJob) -> None:
        source = job.source
        assert source is not None
        remaining = max(source.deadline - self._clock(), 1.0)
        message = encoder_pb2.EncodeJob(
            job_id=job.try_id,
            request_id=source.request_id,
            label=source.label,
            mm_hash=job.mm_hash,
            namespace=job.namespace,
            modality=source.modality,
            processor_options=source.processor_options,
            salt=source.salt,
            media_bytes=source.media.nbytes,
            timeout=remaining,
            failed_lease_token=job.failed_lease_token,
            damaged_digest=job.damaged_digest,
            re_encode=job.re_encode,
            direct=self._pool.reads_direct,
            tenant=tenant_digest(source.tenant),
            priority=source.priority,
        )
        stream = self._transport.open_job(job.address, message, source.media, self._planned, source.trace)
        task = asyncio.create_task(self._follow(job.try_id, job, stream), name=f"job {job.try_id}")
        self._tries[job.try_id] = _Try(job, stream, task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, try_id: str, job: EncoderJob, stream: JobStream) -> None:
        try:
            end = await stream.result()
            plan = plan_from_proto(end.ready.plan) if end.HasField("ready") else None
        except aio.AioRpcError as error:
            why = f"grpc {error.code().name}"
            if error.code() in _BROKEN:
                self._broken(try_id, job, stream, why)
            else:
                self._retry(job, try_id, why)
        except TriptychError as error:
            self._retry(job, try_id, str(error))
        except Exception:
            logger.exception("job %s", try_id, extra=log_fields(mm_hash=job.mm_hash, worker=job.address))
            self._retry(job, try_id, "an unexpected error")
        else:
            if plan is not None:
                self._ready(try_id, plan, end)
            else:
                self._failed(try_id, job, end.failed)
        finally:
            self._tries.pop(try_id, None)
        self._begin(self.table.pump(self._clock()))
        await stream.close()

    def _planned(self, job_id: str, event: EncodeEvent) -> None:
        plan = plan_from_proto(event.planned)
        job = self.table.planned(job_id, plan, early=len(self.table) == 1 and self._pd_idle())
        if job is not None:
            self.arrived.of(job.model).resize(job, tower_patches(plan), self._clock())
            self._tell(job, _of(job, event))
            self._begin(self.table.pump(self._clock()))

    def _ready(self, try_id: str, plan: ItemPlan, event: EncodeEvent) -> None:
        job = self.table.ready(try_id, plan)
        if job is None:
            return
        _unpin(job)
        event.store_epoch, event.clock_jumps = self._epoch()
        end = _of(job, event)
        self.items.store(plan, end, self._clock())
        self._on_ready(end)
        ready = event.ready
        if not ready.already_stored:
            self.model.learn(tower_patches(plan), ready.work_seconds or ready.encode_seconds, job.kind)
            kind, _, model = job.kind.partition("\n")
            cost = self._metrics.encode_cost.labels(self._metrics.kind(kind), model)
            cost.set(self.model.work(None, job.kind))
        self._tell(job, end)

    def _tell(self, job: EncoderJob, event: JobEvent) -> None:
        for request_id in list(job.waiters):
            self._events.deliver(request_id, event)

    def _failed(self, try_id: str, job: EncoderJob, end: JobFailed) -> None:
        hopeless = end.error.code == InternalError.code and job.tries + 1 >= MAX_INTERNAL_ERRORS
        if end.owner_address or (end.retryable and not hopeless):
            self._retry(job, try_id, end.error.message, end.owner_address, end.owner_token)
            return
        if self.table.failed(try_id, job.mm_hash, self._clock(), retryable=False) is not None:
            self._give_up(job, EncodeEvent(failed=JobFailed(error=end.error)))

    def _give_up(self, job: EncoderJob, end: EncodeEvent) -> None:
        """The table has let the job go."""
        _unpin(job)
        self._tell(job, _of(job, end))

    def _broken(self, try_id: str, job: EncoderJob, stream: JobStream, why: str) -> None:
        """The stream ended without an answer; with the item whole at the worker, the item may be why."""
        if not stream.media_sent:
            self._retry(job, try_id, why)
            return
        address = job.address
        if self.table.lost(try_id, job.mm_hash, self._clock()) is None:
            return
        self._tell(job, _retried(job, address, why))
        if job.losses < MAX_LOSSES:
            self._log_later(address, why)
            return
        logger.warning(
            "item %s is given up: %d encoder workers ended at it",
            short(job.mm_hash),
            job.losses,
            extra=log_fields(mm_hash=job.mm_hash, worker=address),
        )
        self._metrics.poison.labels("item").inc()
        self._give_up(job, job_events.failed(_poison(), retryable=False))

    def _retry(self, job: EncoderJob, try_id: str, why: str, owner: str = "", token: str = "") -> None:
        address = job.address
        queued = self.table.failed(
            try_id, job.mm_hash, self._clock(), retryable=True, owner_address=owner, owner_token=token
        )
        if queued is not None:
            self._tell(job, _retried(job, address, why))
            self._log_later(address, why)

    def _log_later(self, address: str, why: str) -> None:
        """One line for all that leave together."""
        if not self._unlogged:
            asyncio.get_running_loop().call_later(_LOG_AFTER, self._log_counts)
        self._unlogged[address, why] += 1

    def _log_counts(self) -> None:
        for (address, why), count in self._unlogged.items():
            logger.info(
                "items that go on elsewhere than at %s: %d (%s)",
                address,
                count,
                why,
                extra=log_fields(worker=address),
            )
        self._unlogged.clear()

    def _drop(self, job: EncoderJob) -> None:
        _unpin(job)
        if entry := self._tries.get(job.try_id):
            self._forget(job.try_id, entry)

    def _forget(self, try_id: str, entry: _Try) -> None:
        self._tries.pop(try_id, None)
        entry.task.cancel()


def _unpin(job: EncoderJob) -> None:
    """The job needs its media no more."""
    if job.source is not None:
        job.source.media.release()
        job.source = None


def _of(job: EncoderJob, event: JobEvent, address: str | None = None) -> JobEvent:
    """The event, as one of the job at its worker, or at the one that it had."""
    event.mm_hash, event.address = job.mm_hash, job.address if address is None else address
    return event


def _retried(job: EncoderJob, address: str, why: str) -> JobEvent:
    """A try at the worker has failed; another one follows."""
    return _of(job, job_events.failed(Unavailable(why), retryable=True), address)


def _poison() -> InvalidRequest:
    return InvalidRequest(
        f"image: {MAX_LOSSES} encoder workers ended while they worked on it; it is not tried again, "
        "save the picture again in another format or leave it out",
        param="image",
    )
