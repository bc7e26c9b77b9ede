"""`simulate`: the records that the load generator would have made of a cluster, and what the cluster did."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Protocol

from triptych.errors import ConfigError
from triptych.goodput.load.record import RequestRecord
from triptych.goodput.load.workload import PlannedRequest
from triptych.simulator.cluster.cluster import SimulatedCluster
from triptych.simulator.cluster.loop import VirtualLoop
from triptych.simulator.cluster.requests import RequestMaker
from triptych.simulator.cluster.shape import ClusterShape, Limits
from triptych.simulator.costs.costs import CostModel, ModelShape
from triptych.simulator.result import Simulation, count


class PoolController(Protocol):
    """What starts and drains encoders while the cluster serves."""

    def start(self, loop: VirtualLoop, cluster: SimulatedCluster) -> None:
        """Called once, before the first request."""

    def stop(self) -> None:
        """Called once all requests have ended: nothing that repeats may be left on the loop."""


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
    controller: PoolController | None = None,
) -> Simulation:
    """Sends `load` to a cluster in virtual time, until every request has ended.

    The real proxy, encoder and PD worker code decides; `costs` (seconds) say how long everything takes, and
    `model_shape` what sizes it has. `load` is `goodput.workload.plan_requests`' and `times` (seconds,
    ascending) `goodput.arrivals.arrival_times`', so that the same requests can be sent to a real cluster;
    `warm_up` of them are marked as not measured. `concurrency` above 0 keeps that many requests in flight
    instead, whatever `times` say. `enough` gets every record as its request ends; once it returns True the
    simulation is over, and requests that had not ended have no record. `controller` changes the encoders of
    `shape` meanwhile.

    `shape` is made by `simulator.shape`'s `on_devices` and `colocated`, or by hand. `limits` are the
    services' flags. `seed` names the pictures: which worker a key belongs to depends on it. Equal
    arguments give equal results.

    The result's `records` go to `goodput.figures.summarise`, `goodput.sustained.judge` and, by way of it,
    `goodput.measure.search`; failures are records with their error, as from a real server ("HTTP 429: …",
    "timeout after …"). Its `counters` tell tower calls, store hits and bytes per second, and the utilisation
    of every pool.

    ConfigError when `load` and `times` differ in length, when there is none, or when pictures would find no
    encoder.
    """
    if len(load) != len(times) and not concurrency:
        raise ConfigError(f"{len(load)} requests have {len(times)} times: there must be one for each")
    if not load:
        raise ConfigError("a load without requests: nothing to simulate")
    if not shape.encoders and controller is None and any(planned.pictures for planned in load):
        raise ConfigError(f"shape {shape.name} has no encoder, but the load has pictures")
    run = _Run(load, times, shape, costs, model_shape, limits or Limits(), seed, warm_up, concurrency, enough)
    run.controller = controller
    with _without_collector():
        return run.result()


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Nothing here makes cycles, and looking for them takes a tenth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Run:
    def __init__(
        self,
        load: Sequence[PlannedRequest],
        times: Sequence[float],
        shape: ClusterShape,
        costs: CostModel,
        model: ModelShape,
        limits: Limits,
        seed: int,
        warm_up: int,
        concurrency: int,
        enough: Callable[[RequestRecord], bool] | None,
    ) -> None:
        self._loop = VirtualLoop()
        self._load = load
        self._times = times
        self._warm_up = warm_up
        self._concurrency = concurrency
        self._maker = RequestMaker(model, seed)
        self._records: dict[int, RequestRecord] = {}
        self._next = 0
        self._enough = enough
        self._over = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.controller: PoolController | None = None
        self._cluster = self._loop.call(
            lambda: SimulatedCluster(self._loop, shape, costs, model, limits, self._maker.items, self._ended)
        )

    def result(self) -> Simulation:
        if self.controller is not None:
            self.controller.start(self._loop, self._cluster)
        for _ in range(min(self._concurrency or 1, len(self._load))):
            self._plan_next(0.0)
        self._loop.run()
        if self.controller is not None:
            self.controller.stop()
        for task in self._tasks:
            task.cancel()
        # Timers that repeat for ever end with the proxy. Messages under way still arrive, unless it is over.
        self._spawn(self._cluster.proxy.close())
        if self._over:
            self._loop.stop()
        self._loop.run()
        records = tuple(self._records[index] for index in sorted(self._records))
        seconds = max(record.sent + record.e2e for record in records)
        counters = count(self._cluster, records, max(seconds, 1e-9))
        return Simulation(records, counters, self._cluster.leftovers())

    def _plan_next(self, moment: float) -> None:
        if self._next < len(self._load):
            index, self._next = self._next, self._next + 1
            self._loop.call_at(moment if self._concurrency else self._times[index], self._send, index)

    def _send(self, index: int) -> None:
        request = self._maker.make(index, self._load[index])
        planned = self._loop.now
        self._spawn(self._cluster.proxy.serve(request, planned, warm_up=index < self._warm_up))
        if not self._concurrency:
            self._plan_next(0.0)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ended(self, record: RequestRecord) -> None:
        self._records[record.index] = record
        if self._enough is not None and self._enough(record):
            self._over = True
        if self._over or len(self._records) == len(self._load):
            self._loop.stop()
        if self._concurrency:
            self._plan_next(record.sent + record.e2e)
