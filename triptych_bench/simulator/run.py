"""`simulate`: the records that the load generator would have made of a cluster, and what the cluster did."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from triptych.base.errors import ConfigError
from triptych_bench.goodput.load.job import RequestRecord
from triptych_bench.goodput.load.workload import PlannedRequest
from triptych_bench.simulator.cluster.cluster import SimulatedCluster
from triptych_bench.simulator.cluster.context import Counters, SimulatedStore, Simulation, SimulationContext
from triptych_bench.simulator.cluster.loop import VirtualLoop
from triptych_bench.simulator.cluster.proxy import SimulatedProxy
from triptych_bench.simulator.cluster.requests import RequestMaker
from triptych_bench.simulator.cluster.shape import ClusterShape, Limits
from triptych_bench.simulator.costs.costs import CostModel, ModelShape

#: As every answer says it; docs/when-to-disaggregate.md has the list in full.
NOT_MODELLED = (
    "failures, limits of the network, the store's CPU, several models, processes that share cores, delays of "
    "tokens in a busy proxy; costs of a GPU that was not profiled are a roofline"
)


class PoolController(Protocol):
    """What starts and drains workers of a pool while the cluster serves: from before the first request until
    all have ended, when nothing that repeats may be left on the loop.
    """

    def start(self, loop: VirtualLoop, cluster: SimulatedCluster) -> None: ...
    def stop(self) -> None: ...


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Without the garbage collector, which takes a tenth of the time, until the simulation is garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.collect(0)
            gc.enable()


@_undisturbed()
def simulate(
    load: Sequence[PlannedRequest],
    times: Sequence[float],
    shape: ClusterShape,
    costs: CostModel,
    model_shape: ModelShape,
    limits: Limits | None = None,
    seed: int = 0,
    *,
    warm_up: int = 0,
    concurrency: int = 0,
    enough: Callable[[RequestRecord], bool] | None = None,
    controllers: Sequence[PoolController] = (),
) -> Simulation:
    """Sends `load` to a cluster in virtual time, until every request has ended; equal arguments give equal
    results.

    `costs` (seconds) say how long everything takes, `model_shape` what sizes it has. `load` and `times`
    (seconds, ascending) are `plan_requests`' and `arrival_times`'; `warm_up` of them are marked as not
    measured. `concurrency` above 0 keeps that many requests in flight instead, whatever `times` say.
    `enough` gets every record as its request ends; once it returns True the simulation is over, and requests
    that had not ended have no record. `controllers` change the workers of `shape` meanwhile. `limits` are
    the services' flags. `seed` names the pictures: which worker a key belongs to depends on it.

    Failures are records with their error, as from a real server ("HTTP 429: …", "timeout after …").
    ConfigError when `load` and `times` differ in length, when there is none, or when pictures would find no
    encoder.
    """
    if len(load) != len(times) and not concurrency:
        raise ConfigError(f"{len(load)} requests have {len(times)} times: there must be one for each")
    if not load:
        raise ConfigError("a load without requests: nothing to simulate")
    if not shape.encoders and not controllers and any(planned.pictures for planned in load):
        raise ConfigError(f"shape {shape.name} has no encoder, but the load has pictures")
    loop, maker, limits = VirtualLoop(), RequestMaker(model_shape, seed), limits or Limits()
    store = SimulatedStore(limits.store_memory, 2 * costs.rpc, in_memory=shape.in_memory)
    context = SimulationContext(loop, costs, model_shape, limits, store, Counters())
    clients = _Clients(loop, maker, load, times, warm_up, concurrency, enough)
    cluster = loop.call(lambda: SimulatedCluster(context, shape, maker.items, clients.ended))
    return clients.send_to(cluster, controllers)


@dataclass(slots=True)
class _Clients:
    """The load generator: sends the requests of `load`, and keeps their records."""

    loop: VirtualLoop
    maker: RequestMaker
    load: Sequence[PlannedRequest]
    times: Sequence[float]
    warm_up: int
    concurrency: int
    enough: Callable[[RequestRecord], bool] | None
    _proxy: SimulatedProxy = field(init=False)
    _records: dict[int, RequestRecord] = field(default_factory=dict)
    _next: int = 0
    _over: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def send_to(self, cluster: SimulatedCluster, controllers: Sequence[PoolController]) -> Simulation:
        """What came of the whole load."""
        self._proxy = cluster.proxy
        for controller in controllers:
            controller.start(self.loop, cluster)
        for _ in range(min(self.concurrency or 1, len(self.load))):
            self._plan_next(0.0)
        self.loop.run()
        for controller in controllers:
            controller.stop()
        for task in self._tasks:
            task.cancel()
        # Timers that repeat for ever end with the proxy. Messages under way still arrive, unless it is over.
        self._spawn(cluster.proxy.close())
        if self._over:
            self.loop.stop()
        self.loop.run()
        records = tuple(self._records[index] for index in sorted(self._records))
        seconds = max(record.sent + record.e2e for record in records)
        return Simulation(records, cluster.finish(max(seconds, 1e-9)), cluster.leftovers())

    def _plan_next(self, moment: float) -> None:
        if self._next < len(self.load):
            index, self._next = self._next, self._next + 1
            self.loop.call_at(moment if self.concurrency else self.times[index], self._send, index)

    def _send(self, index: int) -> None:
        request = self.maker.make(index, self.load[index])
        self._spawn(self._proxy.serve(request, self.loop.now, warm_up=index < self.warm_up))
        if not self.concurrency:
            self._plan_next(0.0)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def ended(self, record: RequestRecord) -> None:
        """A request has been answered, or has failed."""
        self._records[record.index] = record
        if self.enough is not None and self.enough(record):
            self._over = True
        if self._over or len(self._records) == len(self.load):
            self.loop.stop()
        if self.concurrency:
            self._plan_next(record.sent + record.e2e)
