"""Scalers second by second, and the pool that they scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.autoscale import comparison
from benchmarks.autoscale.policies import (
    Concurrency,
    CpuPercent,
    PoolView,
    QueueLength,
    Scaler,
    pd_work,
)
from benchmarks.autoscale.pool import ElasticPDPool, ElasticPool
from benchmarks.autoscale.traces import TRACES, requests_of
from support.simulated import COSTS, LIMITS, MIX, MODEL, PICTURE
from triptych.base.config import EncoderConfig
from triptych_bench.goodput.load.workload import Arrivals, Workload, arrival_times, plan_requests
from triptych_bench.simulator.cluster.context import Simulation
from triptych_bench.simulator.cluster.shape import on_devices
from triptych_bench.simulator.run import simulate


def follow(scaler: Scaler, seconds: int, view: Callable[[int, int], PoolView], workers: int = 1) -> list[int]:
    """What the scaler wants in every second, of a pool that has it at once; `view` of second and workers."""
    sizes = []
    for now in range(seconds):
        workers = scaler.desired(view(now, workers))
        sizes.append(workers)
    return sizes


def at_use(share: Callable[[int], float]) -> Callable[[int, int], PoolView]:
    """Workers that have been busy for this share of their time at each second, all alike."""
    spent = [0.0]

    def view(now: int, workers: int) -> PoolView:
        spent[0] += share(now)
        return PoolView(now, 0, {f"e{index}": spent[0] for index in range(workers)})

    return view


def queue(waiting: Callable[[int], int]) -> Callable[[int, int], PoolView]:
    def view(now: int, workers: int) -> PoolView:
        busy = {f"e{index}": 0.0 for index in range(workers)}
        return PoolView(now, 0, busy, waiting(now), waiting(now))

    return view


def test_workers_that_are_busy_all_the_time_grow_by_the_ratio_to_the_target() -> None:
    sizes = follow(CpuPercent(1, 20), 60, at_use(lambda _: 1.0), workers=4)
    assert sizes[19] == 4 and sizes[20] == 6  # 4 · 1.0 / 0.7, at the first sync with two scrapes


def test_workers_are_taken_away_only_when_nothing_has_asked_for_them_for_five_minutes() -> None:
    sizes = follow(CpuPercent(1, 20), 600, at_use(lambda now: 0.7 if now < 100 else 0.1), workers=6)
    assert sizes[399] == 6 and min(sizes) == 1


def test_there_is_a_worker_for_every_five_that_wait() -> None:
    sizes = follow(QueueLength(100), 800, queue(lambda now: 11 if now < 40 else 0))
    assert max(sizes[:40]) == sizes[300] == 3 and sizes[-1] == 1


def follow_concurrency(items: Callable[[int], int], seconds: int) -> list[int]:
    """The desired pods of every second for `items` at that second, where a pod may have 8."""
    scaler, sizes, pods = Concurrency(0, 50), [], 1
    for now in range(seconds):
        busy = {f"e{index}": 0.0 for index in range(pods)}
        pods = scaler.desired(PoolView(now, 0, busy, items(now), items(now)))
        sizes.append(pods)
    return sizes


def test_twice_what_the_pods_can_have_is_met_within_the_panic_window() -> None:
    sizes = follow_concurrency(lambda now: 2 if now < 100 else 56, 200)
    assert sizes[99] == 1 and max(sizes[:107]) == 10


def test_the_last_pod_goes_when_a_whole_stable_window_was_empty() -> None:
    sizes = follow_concurrency(lambda now: 1 if now < 30 else 0, 200)
    assert sizes[88] == 1 and sizes[92] == 0


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_the_same_for_the_same_seed_and_in_order(name: str) -> None:
    first, second = (requests_of(TRACES[name](), comparison.COSTS.encoder, MODEL, 3) for _ in range(2))
    assert first == second and first[1] == sorted(first[1]) and len(first[0]) == len(first[1])
    assert requests_of(TRACES[name](), comparison.COSTS.encoder, MODEL, 4)[1] != first[1]


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
    pd: ElasticPDPool | None = None,
) -> tuple[Simulation, ElasticPool]:
    pool = ElasticPool(scaler, cold_start, initial)
    found = simulate(
        plan_requests(load, count, 0),
        arrival_times(Arrivals(rate=rate), count, 0),
        on_devices(0, 2 if pd is None else 1),
        SLOW,
        MODEL,
        ONE_BY_ONE,
        controllers=[pool] if pd is None else [pool, pd],
    )
    return found, pool


def all_served(found: Simulation) -> bool:
    return all(record.ok for record in found.records) and not any(found.leftovers.values())


def test_a_worker_that_drains_finishes_what_it_has_and_is_paid_for_until_then() -> None:
    found, pool = serve(Sizes([4, 1], 2.0), count=12, rate=20.0, initial=4)
    assert all_served(found)
    ended = [worker.ended for worker in pool.history.workers if worker.ended is not None]
    assert len(ended) == 3 and max(ended) > 2.5, "none had work left"


def test_the_product_asks_for_the_pd_workers_that_long_prompts_of_few_requests_fill() -> None:
    pool = ElasticPDPool(pd_work(4, 5.0), 5.0)
    # Prompts that keep 2.5 workers busy, and few of the 256 requests that one worker may have.
    costs = replace(COSTS, pd=replace(COSTS.pd, prefill_token=0.01))
    load = replace(PICTURE, images=((0, 1.0),), text_tokens=100, text_quantiles=(), output_tokens=2)
    times, plans = arrival_times(Arrivals(rate=2.5), 200, 0), plan_requests(load, 200, 0)
    simulate(plans, times, on_devices(0, 1), costs, MODEL, comparison.LIMITS, controllers=[pool])
    assert max(moment.desired for moment in pool.history.moments[:40]) == 4


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    every=st.sampled_from([1.0, 2.5, 7.0]),
    cold_start=st.sampled_from([0.0, 0.3, 5.0, 30.0]),
    initial=st.integers(0, 3),
)
def test_whatever_comes_and_goes_all_requests_end_and_nothing_is_left(sizes, every, cold_start, initial):
    scaler = Sizes([*sizes, 2], every)
    pd = ElasticPDPool(Sizes([*(max(size, 1) for size in sizes), 2], every), cold_start)
    found, pool = serve(scaler, MIX, count=12, rate=4.0, cold_start=cold_start, initial=initial, pd=pd)
    assert all_served(found), found.leftovers
    for worker in (*pool.history.workers, *pd.history.workers):
        assert worker.ended is None or worker.ended >= worker.ordered
