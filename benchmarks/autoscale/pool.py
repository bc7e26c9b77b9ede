"""Pools whose workers start, drain and leave in virtual time as a scaler decides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from benchmarks.autoscale.policies import ByDemand, PoolView, Scaler
from triptych.base.scaling import ITEM_SLO, ScalingRules, ScalingTarget
from triptych.proxy.pool import POLL_SECONDS
from triptych_bench.simulator.cluster.cluster import SimulatedCluster
from triptych_bench.simulator.cluster.loop import VirtualLoop, VirtualTimer

#: A scaler is asked once a second.
TICK_SECONDS = 1.0
#: How often a draining worker is looked at: it leaves once it holds nothing.
_DRAIN_POLL = 0.05


@dataclass(eq=False, slots=True)
class WorkerLife:
    """From the order to start a worker until its process has ended; what is paid for."""

    address: str
    ordered: float
    ended: float | None = None

    def seconds(self, now: float) -> float:
        return (now if self.ended is None else self.ended) - self.ordered


class PoolMoment(NamedTuple):
    """The pool at one second: what the scaler wants and what there is, draining workers included."""

    now: float
    desired: int
    ready: int
    alive: int


@dataclass(slots=True)
class PoolHistory:
    """`direction_changes`: how often the size that the scaler wants turns from up to down or back."""

    workers: list[WorkerLife] = field(default_factory=list)
    moments: list[PoolMoment] = field(default_factory=list)

    def worker_seconds(self, now: float) -> float:
        return sum(worker.seconds(now) for worker in self.workers)

    def changes(self) -> tuple[PoolMoment, ...]:
        """The moments that differ from the one before in more than their time."""
        pairs = zip([None, *self.moments], self.moments, strict=False)
        return tuple(one for before, one in pairs if before is None or one[1:] != before[1:])

    @property
    def direction_changes(self) -> int:
        sizes = [moment.desired for moment in self.moments]
        moves = [after > before for before, after in itertools.pairwise(sizes) if after != before]
        return sum(before != after for before, after in itertools.pairwise(moves))


class ElasticPool:
    """A `PoolController` of encoders. New workers take `cold_start` seconds until they have registered.

    Workers that start are given up first, then the youngest drain: they finish what may use their tower,
    what only waits there goes elsewhere. The proxy sees a change at its next look at the registry.
    """

    name, prefix = "encoder", "encoder"

    def __init__(self, scaler: Scaler, cold_start: float, initial: int = 1) -> None:
        self.history = PoolHistory()
        self._scaler, self._cold_start, self._initial = scaler, cold_start, initial
        self._names = itertools.count()
        self._starting: dict[WorkerLife, VirtualTimer] = {}
        self._ready: list[WorkerLife] = []
        #: What the proxy's next look at the registry will show.
        self._changes: list[tuple[Callable[[str], None], str]] = []
        self._tick_timer: VirtualTimer | None = None

    def start(self, loop: VirtualLoop, cluster: SimulatedCluster) -> None:
        self._loop, self._cluster = loop, cluster
        if isinstance(self._scaler, ByDemand):
            self._scaler.attach(cluster)
        self._begin()
        self._tick_timer = loop.call_later(0.0, self._tick)

    def _begin(self) -> None:
        for _ in range(self._initial):
            self._order(0.0)

    def stop(self) -> None:
        """Everything that would start later is given up; the history ends here."""
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        for timer in self._starting.values():
            timer.cancel()

    def _tick(self) -> None:
        self._tick_timer = self._loop.call_later(TICK_SECONDS, self._tick)
        desired = self._scaler.desired(self._view())
        self._resize(desired)
        alive = sum(worker.ended is None for worker in self.history.workers)
        self.history.moments.append(PoolMoment(self._loop.now, desired, len(self._ready), alive))

    def _view(self) -> PoolView:
        encoders, proxy = self._cluster.encoders, self._cluster.proxy
        table, unbound = proxy.dispatcher.jobs.table, self._cluster.known.unbound.total()
        return PoolView(
            now=self._loop.now,
            starting=len(self._starting),
            busy={worker.address: encoders[worker.address].busy_seconds for worker in self._ready},
            outstanding=len(table) + unbound,
            waiting=table.waiting + unbound,
        )

    def _resize(self, desired: int) -> None:
        for _ in range(desired - len(self._starting) - len(self._ready)):
            self._order(self._cold_start)
        while self._starting and len(self._starting) + len(self._ready) > desired:
            worker, timer = self._starting.popitem()
            timer.cancel()
            worker.ended = self._loop.now
        while len(self._ready) > desired:
            self._drain(self._ready.pop())

    def _order(self, seconds: float) -> None:
        worker = WorkerLife(f"{self.prefix}-{next(self._names)}", self._loop.now)
        self.history.workers.append(worker)
        self._starting[worker] = self._loop.call_later(seconds, self._started, worker)

    def _started(self, worker: WorkerLife) -> None:
        del self._starting[worker]
        self._ready.append(worker)
        self._start_worker(worker.address)

    def _start_worker(self, address: str) -> None:
        self._cluster.start_encoder(address)
        self._show(self._cluster.register_encoder, address)

    def _drain(self, worker: WorkerLife) -> None:
        if self.name == "encoder":
            self._cluster.encoders[worker.address].drain()
        self._show(partial(self._cluster.drains, self.name), worker.address)
        self._leave(worker)

    def _holds(self, address: str) -> int:
        """What the worker still has to do."""
        return len(self._cluster.encoders[address])

    def _leave(self, worker: WorkerLife) -> None:
        if self._holds(worker.address):
            self._loop.call_later(_DRAIN_POLL, self._leave, worker)
            return
        worker.ended = self._loop.now
        self._show(partial(self._cluster.gone, self.name), worker.address)

    def _show(self, change: Callable[[str], None], address: str) -> None:
        """The proxy's next look at the registry shows this, with all else since the last one."""
        if not self._changes:
            self._loop.call_later(POLL_SECONDS - self._loop.now % POLL_SECONDS, self._look)
        self._changes.append((change, address))

    def _look(self) -> None:
        changes, self._changes = self._changes, []
        for change, address in changes:
            change(address)
        self._cluster.known.report_change()


class ElasticPDPool(ElasticPool):
    """The PD pool. It begins with the workers of the cluster's shape. One that drains takes no new requests
    and ends its own: the product resumes them elsewhere, and is done sooner.
    """

    name, prefix = "pd", "worker"

    def _begin(self) -> None:
        for address in self._cluster.workers:
            life = WorkerLife(f"{self.prefix}-{next(self._names)}", 0.0)
            assert life.address == address
            self.history.workers.append(life)
            self._ready.append(life)

    def _view(self) -> PoolView:
        workers = {worker.address: self._cluster.workers[worker.address] for worker in self._ready}
        work = self._cluster.proxy.dispatcher.pd_work(ScalingTarget("pd"), ScalingRules(1, 1, ITEM_SLO))
        return PoolView(
            now=self._loop.now,
            starting=len(self._starting),
            busy={address: worker.step_seconds for address, worker in workers.items()},
            outstanding=work.in_flight,
            waiting=work.unplaced + sum(worker.scheduler.num_waiting for worker in workers.values()),
        )

    def _start_worker(self, address: str) -> None:
        self._cluster.start_pd(address)
        self._show(self._cluster.register_pd, address)

    def _holds(self, address: str) -> int:
        """Until the proxy has seen that the worker drains, it may send one more request."""
        known = self._cluster.known.workers.get(("pd", address))
        if known is None or known.serving:
            return 1
        links = self._cluster.proxy.dispatcher.pd_links
        return self._cluster.workers[address].held + (links[address].in_flight if address in links else 0)
