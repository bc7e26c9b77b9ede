"""One trace served by one scaler: what it costs in encoder-seconds and what it is good for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.goodput.load.record import RequestRecord
from triptych.goodput.load.workload import PlannedRequest
from triptych.goodput.measure.figures import percentile
from triptych.goodput.measure.slo import Slo
from triptych.simulator.autoscale.pool import ElasticPool, PoolHistory
from triptych.simulator.autoscale.scaler import Scaler
from triptych.simulator.cluster.shape import Limits, on_devices
from triptych.simulator.costs.costs import CostModel, ModelShape
from triptych.simulator.run import simulate


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """The cluster beside its encoders, and what a good request keeps to."""

    costs: CostModel
    model: ModelShape
    pd_workers: int
    limits: Limits
    slo: Slo


@dataclass(frozen=True, slots=True)
class TrialResult:
    """`ttft` is the 99th percentile in seconds; `good` requests met the SLO."""

    records: Sequence[RequestRecord]
    history: PoolHistory
    seconds: float
    leftovers: Mapping[str, int]
    slo: Slo

    @property
    def worker_seconds(self) -> float:
        return self.history.worker_seconds(self.seconds)

    @property
    def good(self) -> int:
        return self.good_within(self.slo)

    @property
    def failures(self) -> int:
        return sum(not record.ok for record in self.records)

    @property
    def ttft(self) -> float:
        return percentile(sorted(record.ttft for record in self.records if record.ok), 99.0)

    def good_within(self, slo: Slo) -> int:
        return sum(not slo.misses(record.latencies()) for record in self.records)


def run_trial(
    setup: TrialSetup,
    load: Sequence[PlannedRequest],
    times: Sequence[float],
    scaler: Scaler,
    cold_start: float,
    initial: int = 1,
) -> TrialResult:
    """Serves the load until its last request has ended; `initial` encoders are there from the start."""
    pool = ElasticPool(scaler, cold_start, initial)
    found = simulate(
        load,
        times,
        on_devices(0, setup.pd_workers),
        setup.costs,
        setup.model,
        setup.limits,
        controller=pool,
    )
    return TrialResult(found.records, pool.history, found.counters.seconds, found.leftovers, setup.slo)
