"""Encoders that come and go under the real proxy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.autoscale.policies import PoolView, Scaler
from benchmarks.autoscale.pool import ElasticPool
from support.simulated import COSTS, LIMITS, MIX, MODEL, PICTURE
from triptych.base.config import EncoderConfig
from triptych.goodput.load.workload import Arrivals, Workload, arrival_times, plan_requests
from triptych.simulator.cluster.context import Simulation
from triptych.simulator.cluster.shape import on_devices
from triptych.simulator.run import simulate

#: A picture takes a second of an encoder's tower, one at a time.
SLOW = replace(COSTS, encoder=replace(COSTS.encoder, tower_batch=1.0))
ONE_BY_ONE = replace(LIMITS, encoder=EncoderConfig(encoder_batch_patches=1))


class Sizes:
    """A pool of one size after another, `every` seconds each; the last one stays."""

    def __init__(self, sizes: Sequence[int], every: float) -> None:
        self._sizes = sizes
        self._every = every

    def desired(self, seen: PoolView) -> int:
        return self._sizes[min(int(seen.now / self._every), len(self._sizes) - 1)]


def serve(
    scaler: Scaler,
    load: Workload = PICTURE,
    *,
    count: int = 20,
    rate: float = 2.0,
    cold_start: float = 5.0,
    initial: int = 1,
) -> tuple[Simulation, ElasticPool]:
    pool = ElasticPool(scaler, cold_start, initial)
    found = simulate(
        plan_requests(load, count, 0),
        arrival_times(Arrivals(rate=rate), count, 0),
        on_devices(0, 2),
        SLOW,
        MODEL,
        ONE_BY_ONE,
        controller=pool,
    )
    return found, pool


def all_served(found: Simulation) -> bool:
    return all(record.ok for record in found.records) and not any(found.leftovers.values())


def test_a_worker_that_drains_finishes_what_it_has_and_is_paid_for_until_then() -> None:
    found, pool = serve(Sizes([4, 1], 2.0), count=12, rate=20.0, initial=4)
    assert all_served(found)
    drained = [worker for worker in pool.history.workers if worker.drains is not None]
    assert len(drained) == 3
    assert all(worker.ended is not None for worker in drained)
    assert max(worker.ended or 0.0 for worker in drained) > 2.5, "none had work left"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    every=st.sampled_from([1.0, 2.5, 7.0]),
    cold_start=st.sampled_from([0.0, 0.3, 5.0, 30.0]),
    initial=st.integers(0, 3),
)
def test_whatever_comes_and_goes_all_requests_end_and_nothing_is_left(sizes, every, cold_start, initial):
    scaler = Sizes([*sizes, 2], every)
    found, pool = serve(scaler, MIX, count=12, rate=4.0, cold_start=cold_start, initial=initial)
    assert all_served(found), found.leftovers
    assert all(worker.ended is None or worker.ended >= worker.ordered for worker in pool.history.workers)
