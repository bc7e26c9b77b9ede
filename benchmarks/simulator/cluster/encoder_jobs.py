"""The proxy's encoder jobs in virtual time: the real table decides, streams are messages with a latency.

Simpler than `proxy/encoders/job_runner.py`: encoders neither fail nor end, so no try is repeated.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.config import EncoderConfig
from triptych.proxy.admission import Backpressure
from triptych.proxy.encoders.job import EncoderJob, EncoderSlot, StartPlan
from triptych.proxy.encoders.job_table import EncoderJobTable
from triptych.proxy.routing import WorkModel
from triptych.simulator.cluster.clock import Clock
from triptych.simulator.cluster.encoder import JobStream, Ready, SimulatedEncoder
from triptych.simulator.cluster.requests import NAMESPACE, Item
from triptych.types import ItemPlan

#: Items whose publication is remembered, for look-ups that were under way then.
RECENT_ITEMS = 4096


@dataclass(frozen=True, slots=True)
class JobSink:
    """Where the jobs' news goes: (request, item, …)."""

    planned: Callable[[str, str, ItemPlan], None]
    ready: Callable[[str, str, Ready], None]


class EncoderJobs:
    """The encoder jobs of the proxy."""

    def __init__(
        self,
        clock: Clock,
        encoders: Sequence[SimulatedEncoder],
        config: EncoderConfig,
        sink: JobSink,
        *,
        share: int,
        rpc: float,
        flow_control: bool = True,
    ) -> None:
        self._model = WorkModel()
        self.table = EncoderJobTable(share, _patches, self._model, flow_control=flow_control)
        self.backpressure = Backpressure(flow_control=flow_control)
        self._clock = clock
        self._encoders = {f"encoder-{index}": encoder for index, encoder in enumerate(encoders)}
        self._sink = sink
        self._rpc = rpc
        self._items: dict[str, Item] = {}
        self._streams: dict[str, JobStream] = {}
        self._recent: OrderedDict[str, tuple[float, Ready]] = OrderedDict()
        self.re_encodes = 0
        self.table.set_encoders(
            EncoderSlot(address, (NAMESPACE,), config.plan_credit, config.tower_credit)
            for address in self._encoders
        )

    def work(self, plan: ItemPlan | None) -> float:
        """Seconds of tower time expected of an item."""
        return self._model.work(_patches(plan) if plan is not None else None)

    def start(
        self, item: Item, request_id: str, looked_up: float, *, re_encode: bool = False, counts: bool = True
    ) -> bool:
        """The request wants the item encoded. True when it joined a job that was there."""
        key = item.plan.mm_hash
        if not re_encode and self._published_since(key, request_id, looked_up):
            return True
        job, joined = self.table.want(key, request_id, NAMESPACE, re_encode=re_encode)
        self._items[key] = item
        if not joined:
            self.re_encodes += re_encode
            self.backpressure.record(self.work(job.plan), self._clock.now, re_encode=re_encode and counts)
        if job.plan is not None:
            self._clock.after(0.0, self._sink.planned, request_id, key, job.plan)
        self.pump()
        return joined

    def _published_since(self, key: str, request_id: str, looked_up: float) -> bool:
        landed, end = self._recent.get(key, (0.0, None))
        if end is None or landed < looked_up:
            return False
        self._clock.after(0.0, self._sink.ready, request_id, key, end)
        return True

    def leave(self, request_id: str) -> None:
        """The request has ended; jobs without another waiter are cancelled."""
        for job in self.table.leave(request_id):
            stream = self._streams.pop(job.try_id, None)
            if stream is not None:
                self._soon(self._encoders[job.address].leave, stream)
        self.pump()

    def pump(self) -> None:
        """Starts what may start."""
        for action in self.table.pump(self._clock.now):
            job = action.job
            if isinstance(action, StartPlan):
                self._open(job)
            else:
                self._soon(self._encoders[job.address].run, self._streams[job.try_id])

    def _open(self, job: EncoderJob) -> None:
        try_id = job.try_id
        stream = JobStream(
            item=self._items[job.mm_hash],
            re_encode=job.re_encode,
            planned=functools.partial(self._soon, self._planned, try_id),
            ready=functools.partial(self._soon, self._ready, try_id),
        )
        self._streams[try_id] = stream
        self._soon(self._encoders[job.address].open, stream)

    def _soon(self, call: Callable[..., None], *arguments: Any) -> None:
        """The message needs its time."""
        self._clock.after(self._rpc, call, *arguments)

    def _planned(self, try_id: str, plan: ItemPlan) -> None:
        job = self.table.planned(try_id, plan)
        if job is not None:
            for request_id in sorted(job.waiters):
                self._sink.planned(request_id, job.mm_hash, plan)
            self.pump()

    def _ready(self, try_id: str, end: Ready) -> None:
        self._streams.pop(try_id, None)
        job = self.table.ready(try_id, end.plan)
        if job is not None:
            self._recent[job.mm_hash] = (self._clock.now, end)
            if len(self._recent) > RECENT_ITEMS:
                self._recent.popitem(last=False)
            if not end.already_stored and end.encode_seconds > 0:
                self._model.learn(_patches(end.plan), end.encode_seconds)
            for request_id in sorted(job.waiters):
                self._sink.ready(request_id, job.mm_hash, end)
        self.pump()


def _patches(plan: ItemPlan) -> int:
    return plan.grid_thw[2]
