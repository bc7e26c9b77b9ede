"""Encoders that come and go under the real proxy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.autoscale.policies import (
    Concurrency,
    CpuPercent,
    FixedSize,
    PoolView,
    QueueLength,
    Scaler,
    WorkSeconds,
)
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


def test_requests_wait_until_the_first_worker_of_an_empty_pool_has_started() -> None:
    found, pool = serve(FixedSize(1), count=3, cold_start=20.0, initial=0)
    assert all_served(found)
    assert min(record.sent + record.ttft for record in found.records) > 21.0
    assert [worker.ready for worker in pool.history.workers] == [20.0]


def test_requests_without_pictures_do_not_wait_for_an_empty_pool() -> None:
    found, _ = serve(FixedSize(1), replace(MIX, images=((0, 0.5), (1, 0.5))), cold_start=60.0, initial=0)
    assert all_served(found)
    assert all((record.ttft < 2.0) == (record.images == 0) for record in found.records)


def test_a_worker_that_drains_finishes_what_it_has_and_is_paid_for_until_then() -> None:
    found, pool = serve(Sizes([4, 1], 2.0), count=12, rate=20.0, initial=4)
    assert all_served(found)
    drained = [worker for worker in pool.history.workers if worker.drains is not None]
    assert len(drained) == 3
    assert all(worker.ended is not None for worker in drained)
    assert max(worker.ended or 0.0 for worker in drained) > 2.5, "none had work left"


def test_a_worker_that_starts_is_given_up_before_one_that_works() -> None:
    _, pool = serve(Sizes([1, 3, 1], 4.0), cold_start=60.0)
    assert [worker.ready for worker in pool.history.workers] == [0.0, None, None]
    assert [worker.ended for worker in pool.history.workers] == [None, 8.0, 8.0]


def test_encoder_seconds_count_from_the_order_to_the_end() -> None:
    _, pool = serve(Sizes([1, 2], 4.0), cold_start=5.0)
    assert pool.history.worker_seconds(100.0) == pytest.approx(100.0 + 96.0)


def test_direction_changes_are_turns_of_the_wanted_size() -> None:
    _, pool = serve(Sizes([1, 2, 4, 4, 3, 1, 2, 2], 2.0), count=40)
    assert pool.history.direction_changes == 2


def test_workers_that_come_take_a_part_of_what_waits_at_the_others() -> None:
    found, _ = serve(Sizes([1, 8], 3.0), count=40, rate=40.0, cold_start=1.0)
    # One worker alone would take 40 s.
    assert all_served(found) and max(record.ttft for record in found.records) < 12.0


SCALERS = {
    "ours": lambda: WorkSeconds(0, 4, 5.0),
    "hpa": lambda: CpuPercent(1, 4),
    "queue": lambda: QueueLength(0, 4),
    "knative": lambda: Concurrency(0, 4),
}


@pytest.mark.parametrize("name", SCALERS)
def test_every_policy_serves_all_requests_from_an_empty_pool(name: str) -> None:
    found, pool = serve(SCALERS[name](), MIX, count=30, initial=0)
    assert all_served(found)
    assert max(moment.alive for moment in pool.history.moments) <= 5


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    every=st.sampled_from([1.0, 2.5, 7.0]),
    cold_start=st.sampled_from([0.0, 0.3, 5.0, 30.0]),
    initial=st.integers(0, 3),
)
def test_whatever_comes_and_goes_all_requests_end_and_nothing_is_left(
    sizes: list[int], every: float, cold_start: float, initial: int
) -> None:
    scaler = Sizes([*sizes, 2], every)
    found, pool = serve(scaler, MIX, count=12, rate=4.0, cold_start=cold_start, initial=initial)
    assert all_served(found), found.leftovers
    assert all(worker.ended is None or worker.ended >= worker.ordered for worker in pool.history.workers)
