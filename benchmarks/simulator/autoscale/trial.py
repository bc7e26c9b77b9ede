"""One trace served by one scaler: what it costs in encoder-seconds and what it is good for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from triptych.config import GIB, EncoderConfig, PDConfig, ProxyConfig
from triptych.goodput.load.record import RequestRecord
from triptych.goodput.load.workload import PlannedRequest
from triptych.goodput.measure.figures import percentile
from triptych.goodput.measure.slo import Slo
from triptych.simulator.autoscale.pool import ElasticPool, PoolHistory
from triptych.simulator.autoscale.scaler import Scaler
from triptych.simulator.cluster.shape import Limits, on_devices
from triptych.simulator.costs.chips import Chip
from triptych.simulator.costs.costs import CostModel, ModelShape
from triptych.simulator.costs.published import (
    QWEN3_VL_4B,
    QWEN3_VL_4B_SHAPE,
    encoder_costs,
    published,
)
from triptych.simulator.run import simulate

#: Encoders on CPUs that reach 4 TFLOP/s of bfloat16, and 300 GB/s. Assumed, not measured.
CPU = Chip("a server CPU", 8e12, 300e9, 0.5, 64 * 10**9)
SLO = Slo((("ttft", 10_000.0), ("tpot", 100.0)))


def _costs() -> CostModel:
    decoder = published("a100-80g")
    return CostModel(
        name=f"encoders on {CPU.name}, PD workers on an A100",
        source=decoder.source,
        encoder=encoder_costs(CPU, QWEN3_VL_4B),
        pd=decoder.pd,
        proxy=decoder.proxy,
        rpc=decoder.rpc,
    )


@dataclass(frozen=True, slots=True)
class TrialSetup:
    """The cluster beside its encoders: more PD workers and store than the traces need."""

    costs: CostModel = field(default_factory=_costs)
    model: ModelShape = QWEN3_VL_4B_SHAPE
    pd_workers: int = 3
    limits: Limits = field(
        default_factory=lambda: Limits(
            proxy=ProxyConfig(max_queue=100_000),
            encoder=EncoderConfig(device="cpu"),
            pd=PDConfig(
                kv_memory=20 * GIB,
                max_num_seqs=256,
                max_num_batched_tokens=2048,
                encoder_cache_memory=4 * GIB,
            ),
            store_memory=64 * GIB,
        )
    )
    slo: Slo = SLO


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
