"""An encoder worker in virtual time: its real scheduler, with delays for preprocessing, tower and saves.

It carries out what `encoder_worker/jobs/` and `encoder_worker/engine.py` do. Simpler than there: one
proxy, so one waiter a job and leases that are always free (their round trip counts); no job is refused for
memory, which the proxy's credit sees to; media arrive with the job's first message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.base.config import MIB
from triptych.base.errors import Unavailable
from triptych.encoder_worker.scheduler import EncoderItem, EncoderScheduler, Stage
from triptych.protos.convert import plan_to_proto
from triptych.protos.encoder_pb2 import EncodeEvent, ItemReady
from triptych.protos.job_events import failed, planned
from triptych_bench.simulator.cluster.context import ByteLru, SimulationContext
from triptych_bench.simulator.cluster.loop import FifoLock
from triptych_bench.simulator.cluster.requests import SimulatedItem
from triptych_bench.simulator.costs.costs import EncoderCosts

if TYPE_CHECKING:
    from triptych_bench.simulator.cluster.transport import SimulatedJob

#: As in the worker: outputs kept on the host, and bytes of saves under way at which the tower pauses.
KEPT_BYTES, SAVING_BYTES = 64 * MIB, 256 * MIB
_DRAINS = failed(Unavailable("this encoder worker is shutting down"), retryable=True)


@dataclass(eq=False, slots=True, kw_only=True)
class _Job(EncoderItem):
    """An item's job. `kept`: the output is kept from an earlier job and only needs its save."""

    item: SimulatedItem
    stream: SimulatedJob | None
    kept: bool = False

    def drop_pixels(self) -> None:
        EncoderItem.drop_pixels(self)
        self.kept = False


class SimulatedEncoder:
    """All methods are called at the worker's own moment; the proxy's messages have been on their way."""

    def __init__(self, context: SimulationContext, costs: EncoderCosts, device: FifoLock) -> None:
        config = context.limits.encoder
        self.scheduler = EncoderScheduler[_Job](
            prepared_memory=config.prepared_memory,
            batch_patches=config.batch_patches,
            preparations=context.limits.decode_threads,
            tower_credit=max(1, config.tower_credit),
        )
        self.tower_seconds = 0.0
        self.saving_bytes = 0
        self._counters, self._loop, self._store = context.counters, context.loop, context.store
        self.costs, self._device, self._rpc = costs, device, context.costs.rpc
        self._kept = ByteLru(KEPT_BYTES)
        self._jobs: dict[str, _Job] = {}
        self._tower_busy = self._draining = False
        #: When the batch under way began.
        self._began: float | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def busy_seconds(self) -> float:
        """Of its tower since the start, the batch under way included."""
        return self.tower_seconds + (self._loop.now - self._began if self._began is not None else 0.0)

    def open(self, stream: SimulatedJob) -> None:
        """A try begins, its media with it."""
        if self._draining:
            stream.send(_DRAINS)
            return
        key = stream.item.plan.mm_hash
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _Job(item=stream.item, stream=stream, looked_up=False)
            self.scheduler.add(job)
            self._loop.call_later(self._store.trip, self._looked_up, job)
        else:
            job.stream = stream
            if job.planned:
                stream.send(planned(job.item.plan))
        job.re_encode = job.re_encode or stream.re_encode
        self._media(job)

    def run(self, stream: SimulatedJob) -> None:
        """The item may use the tower."""
        job = self._jobs.get(stream.item.plan.mm_hash)
        if job is not None and job.stream is stream:
            self.scheduler.permit(job)
            self._pump()

    def leave(self, stream: SimulatedJob) -> None:
        """The stream is over. What is in the tower stays until it is through."""
        job = self._jobs.get(stream.item.plan.mm_hash)
        if job is not None and job.stream is stream:
            job.stream = None
            if job.stage is not Stage.ENCODING:
                self._forget(job)
            self._pump()

    def drain(self) -> None:
        """Refuses new jobs, finishes those that may use the tower, sends the others elsewhere at once."""
        self._draining = True
        for job in list(self._jobs.values()):
            if job.stage is not Stage.ENCODING and job.permitted_at is None:
                self._forget(job, _DRAINS)
        self._pump()

    def _media(self, job: _Job) -> None:
        if self._holds(job) and self.scheduler.needs_media(job):
            self.scheduler.media_arrived(job)
            self._pump()

    def _looked_up(self, job: _Job) -> None:
        if not self._holds(job) or self._is_stored(job):
            return
        job.looked_up = True
        if self._kept.get(job.item.plan.mm_hash) is not None:
            job.kept = True
            self._plan(job, job.item.plan.nbytes, 0)
        self._pump()

    def _is_stored(self, job: _Job) -> bool:
        """Whether the store has the item already; its job is over then."""
        stored = self._store.get(job.item.plan.mm_hash) is not None
        if stored:
            found = ItemReady(plan=plan_to_proto(job.item.plan), already_stored=True)
            self._forget(job, EncodeEvent(ready=found))
        return stored

    def _pump(self) -> None:
        scheduler = self.scheduler
        while (job := scheduler.next_preparation(self._loop.now)) is not None:
            self._loop.call_later(self.costs.prepare(job.item.pixels), self._prepared, job)
        while (job := scheduler.next_media_request()) is not None:
            self._loop.call_later(2 * self._rpc, self._media, job)
        if not self._tower_busy and self.saving_bytes <= SAVING_BYTES and (batch := scheduler.next_batch()):
            self._tower_busy = True
            # One look at the store, then the leases.
            self._loop.call_later(self._store.trip, self._check_batch, batch)

    def _prepared(self, job: _Job) -> None:
        self.scheduler.decoded(job, self._loop.now)
        if self._holds(job):
            self._plan(job, job.item.prepared_bytes, job.item.patches)
        self._pump()

    def _plan(self, job: _Job, nbytes: int, cost: int) -> None:
        if not job.planned and job.stream is not None:
            job.stream.send(planned(job.item.plan))
        self.scheduler.prepared(job, nbytes=nbytes, cost=cost)

    def _check_batch(self, batch: list[_Job]) -> None:
        left = []
        for job in batch:
            if job.stream is None:
                self._forget(job)
            elif not self._is_stored(job):
                left.append(job)
        if left:
            self._loop.call_later(2 * self._rpc, self._begin_batch, left)
        else:
            self._tower_free()

    def _begin_batch(self, batch: list[_Job]) -> None:
        if fresh := [job for job in batch if not job.kept]:
            self._device.acquire(lambda: self._encode(batch, fresh))
        else:
            self._encoded(batch, 0.0)

    def _encode(self, batch: list[_Job], fresh: list[_Job]) -> None:
        started = self._began = self._loop.now
        self._counters.tower_items += len(fresh)

        def done() -> None:
            seconds = self._loop.now - started
            self.tower_seconds += seconds
            self._began = None
            self._device.release()
            self._encoded(batch, seconds)

        patches = sum(job.item.patches for job in fresh)
        self._loop.call_later(self.costs.tower(len(fresh), patches), done)

    def _encoded(self, batch: list[_Job], seconds: float) -> None:
        for job in batch:
            self._kept.put(job.item.plan)
            if job.stream is None:
                self._forget(job)
            else:
                self._save(job, seconds)
        self._tower_free()

    def _tower_free(self) -> None:
        self._tower_busy = False
        self._pump()

    def _save(self, job: _Job, encode_seconds: float) -> None:
        plan, started = job.item.plan, self._loop.now
        self.saving_bytes += plan.nbytes

        def saved() -> None:
            self.saving_bytes -= plan.nbytes
            self._store.put(plan)
            seconds = self._loop.now - started
            end = ItemReady(plan=plan_to_proto(plan), encode_seconds=encode_seconds, save_seconds=seconds)
            self._forget(job, EncodeEvent(ready=end))
            self._pump()

        if self._store.in_memory:
            saved()
        else:
            self._loop.call_later(self.costs.save(plan.nbytes), saved)

    def _forget(self, job: _Job, end: EncodeEvent | None = None) -> None:
        """The job is over; `end` is the last message to its stream, if one still listens."""
        if end is not None and job.stream is not None:
            job.stream.send(end)
        if self._holds(job):
            del self._jobs[job.item.plan.mm_hash]
            self.scheduler.remove(job)

    def _holds(self, job: _Job) -> bool:
        """Whether the job has not ended."""
        return self._jobs.get(job.item.plan.mm_hash) is job
