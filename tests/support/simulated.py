"""Clusters in virtual time for tests: costs that are easy to add up, and loads made in a line."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.base.config import GIB, PDConfig, ProxyConfig
from triptych_bench.goodput.load.workload import (
    Arrivals,
    PlannedRequest,
    Workload,
    arrival_times,
    plan_requests,
)
from triptych_bench.simulator.cluster.context import Simulation
from triptych_bench.simulator.cluster.shape import ClusterShape, Limits
from triptych_bench.simulator.costs.costs import CostModel, EncoderCosts, ModelShape, PDCosts, ProxyCosts
from triptych_bench.simulator.run import simulate

RPC = 0.0003
COSTS = CostModel(
    name="round",
    source="made up",
    encoder=EncoderCosts(0.002, 1e-8, 0.005, 0.001, 2e-5, 5e-4, 1e-10),
    pd=PDCosts(0.008, 4e-5, 1e-4, 1e-8, 1e-9, 5e-4, 1e-10, take_request=3e-4, take_token=1e-6),
    proxy=ProxyCosts(5e-4, 1e-9, 2e-5, item=1e-4),
    rpc=RPC,
)
#: A picture of 320x320 has 400 patches and 100 rows of 1 KiB.
MODEL = ModelShape(16, 2, 4096, 1 << 24, 1024, 1000, 20)
LIMITS = Limits(
    proxy=ProxyConfig(max_queue=100_000),
    pd=PDConfig(kv_memory=GIB, max_num_seqs=128, max_num_batched_tokens=1024),
)
TEXT = Workload(100, 20)
PICTURE = Workload(50, 20, ((1, 1.0),), ((320, 320, 1.0),))
MIX = Workload(60, 24, ((0, 0.5), (1, 0.3), (3, 0.2)), ((320, 320, 0.7), (640, 640, 0.3)), 0.3, 0.5, 0.5)


def run(
    shape: ClusterShape,
    load: Workload | Sequence[PlannedRequest],
    times: Sequence[float] | None = None,
    *,
    rate: float = 10.0,
    count: int = 60,
    limits: Limits = LIMITS,
    costs: CostModel = COSTS,
    seed: int = 0,
) -> Simulation:
    """Poisson at `rate` unless `times` are given."""
    if isinstance(load, Workload):
        load = plan_requests(load, count if times is None else len(times), seed)
    if times is None:
        times = arrival_times(Arrivals(rate=rate), len(load), seed)
    return simulate(load, times, shape, costs, MODEL, limits, seed)
