"""The scaling policy, by tables and by properties: plain values in, plain values out."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.base.scaling import PoolDemand, ScalingDecision, ScalingRules, WorkerGroup
from triptych.proxy.scaling.policy import (
    MIN_PATIENCE,
    WINDOW_STEPS,
    Observation,
    ScalingState,
    decide,
)

RULES = ScalingRules(minimum=0, maximum=64, slo=2.0)
#: Ten seconds of work that arrive in each second, and nothing that waits.
TEN = PoolDemand(fast=10.0, slow=10.0)


class Pool:
    """A pool whose workers are ready as soon as they are asked for, unless `ready` says how many are."""

    def __init__(self, workers: int, rules: ScalingRules = RULES, cold_start: float = 5.0) -> None:
        self.state = ScalingState.holding(workers)
        self.rules = rules
        self.cold_start = cold_start
        self.now = 100.0
        self.ready: int | None = None
        self.others: tuple[WorkerGroup, ...] = ()

    def poll(self, demand: PoolDemand, seconds: float = 1.0, *, came: bool | None = None) -> ScalingDecision:
        self.now += seconds
        ready = self.state.workers if self.ready is None else self.ready
        groups = [WorkerGroup("own", ready), *self.others]
        seen = Observation(self.now, demand, groups, self.cold_start, came)
        self.state, decision = decide(seen, self.state, self.rules)
        return decision

    def run(self, demand: PoolDemand, seconds: float) -> list[int]:
        return [self.poll(demand).workers for _ in range(int(seconds))]


def queue(items: int, cost: float) -> PoolDemand:
    return PoolDemand(backlog=items * cost, waiting=items, largest=cost)


@pytest.mark.parametrize(
    ("demand", "workers", "reason"),
    [
        (TEN, 15, "flow"),  # 10 / 0.7
        (PoolDemand(fast=0.7, slow=0.7), 1, "flow"),
        (PoolDemand(fast=0.7 * 3, slow=0.7 * 3), 3, "flow"),  # a sum that equals the limit needs no more
        (PoolDemand(fast=0.71, slow=0.71), 2, "flow"),
        (queue(30, 0.5), 10, "backlog"),  # 15 s of work, 1.5 s to begin it in
        (queue(30, 1.5), 30, "backlog"),  # an item alone takes most of the time: 45 / 1.5
        (queue(3, 0.5), 1, "backlog"),
        (queue(1, 600.0), 1, "backlog"),  # longer than the SLO, but one item is one worker's
        (queue(4, 600.0), 4, "backlog"),
        (queue(1_000_000, 0.5), 64, "max"),
        (PoolDemand(fast=3.0, slow=1.0, waiting=9), 5, "panic"),
        (PoolDemand(fast=1.9, slow=1.0, waiting=9), 2, "flow"),
    ],
)
def test_the_workers_that_demand_asks_for(demand: PoolDemand, workers: int, reason: str) -> None:
    assert Pool(0).poll(demand) == ScalingDecision(workers, reason, active=True)


@pytest.mark.parametrize("cost", [0.0, 1e-9, 5.0, math.nan, math.inf, -1.0])
def test_the_first_item_takes_a_pool_from_zero_to_one_whatever_it_costs(cost: float) -> None:
    decision = Pool(0).poll(PoolDemand(backlog=cost, waiting=1, largest=cost))
    assert (decision.workers, decision.active) == (1, True)


def test_no_more_workers_than_items_to_work_on() -> None:
    # One item of half a minute fills the fast average as many small ones would.
    one = PoolDemand(backlog=30.0, waiting=0, largest=30.0, fast=5.0, slow=0.5)
    assert Pool(1).poll(one).workers == 1
    # Those that a tower has already stay there.
    assert Pool(1).poll(PoolDemand(backlog=8.0, waiting=0, largest=1.0)).workers == 1
    assert Pool(1).poll(PoolDemand(backlog=8.0, waiting=2, largest=1.0)).workers == 3


def test_up_at_once_and_down_only_after_a_whole_window() -> None:
    pool = Pool(1)
    assert pool.poll(TEN).workers == 15
    less = PoolDemand(fast=2.0, slow=2.0)
    course = pool.run(less, 59)
    assert set(course) == {15}
    assert pool.poll(less).reason == "hold"
    assert pool.run(less, 2)[-1] == 4  # with a quarter in reserve: 2.5 / 0.7


def test_a_peak_in_the_window_begins_it_anew() -> None:
    pool = Pool(1)
    pool.poll(TEN)
    pool.run(PoolDemand(fast=2.0, slow=2.0), 40)
    pool.poll(PoolDemand(fast=6.0, slow=6.0))  # needs 9 of the 15
    course = pool.run(PoolDemand(fast=2.0, slow=2.0), 70)
    # With a quarter in reserve the peak keeps 11 workers from the end of the first window on.
    assert course[:19] == [15] * 19 and course[25] == 11 and course[-1] == 4


def test_never_down_while_arrivals_burst() -> None:
    pool = Pool(20)
    burst = PoolDemand(backlog=1.0, waiting=4, largest=0.25, fast=2.0, slow=0.5)
    assert set(pool.run(burst, 200)) == {20}


def test_to_zero_only_after_the_window_and_three_cold_starts_without_work() -> None:
    for cold_start, idle in ((5.0, 60), (60.0, 180)):
        pool = Pool(0, cold_start=cold_start)
        pool.poll(queue(4, 0.5))
        course = pool.run(PoolDemand(), idle + 5)
        assert course.index(0) in (idle - 1, idle, idle + 1)
        assert pool.poll(PoolDemand()) == ScalingDecision(0, "idle", active=False)
        assert pool.poll(queue(1, 0.5)).workers == 1


def fading(seconds: float, flow: float) -> PoolDemand:
    """What is left of a flow so many seconds after its last item."""
    return PoolDemand(fast=flow * math.exp(-seconds / 6.0), slow=flow * math.exp(-seconds / 60.0))


def test_the_time_to_zero_is_counted_from_the_last_item_however_many_came_before_it() -> None:
    pool = Pool(0, replace(RULES, window=20.0))
    for _ in range(5):
        pool.poll(queue(60, 0.2))
    course = [pool.poll(fading(second, 10.0), came=False).workers for second in range(60)]
    assert course.index(0) in (19, 20, 21)
    assert pool.poll(fading(60.0, 10.0), came=True).workers > 0


def test_items_that_are_done_between_two_looks_keep_a_pool_awake() -> None:
    pool = Pool(1, replace(RULES, window=20.0))
    pool.poll(queue(60, 0.2))
    course = [
        pool.poll(PoolDemand(fast=0.001, slow=0.001), came=second % 15 == 0).workers for second in range(200)
    ]
    assert min(course) == 1


def test_what_another_proxy_keeps_for_its_items_stays() -> None:
    pool = Pool(1, replace(RULES, window=20.0))
    course = [pool.poll(PoolDemand(kept=1), came=False).workers for _ in range(100)]
    assert min(course) == 1


def test_workers_of_other_kinds_count_by_their_speed() -> None:
    pool = Pool(0)
    pool.others = (WorkerGroup("fast", 2, speed=5.0), WorkerGroup("slow", 3, speed=0.5))
    assert pool.poll(TEN).workers == 3  # 14.3 - 10 - 1.5


def test_a_pool_of_other_kinds_that_is_enough_needs_none_of_its_own() -> None:
    pool = Pool(0)
    pool.others = (WorkerGroup("fast", 4, speed=5.0),)
    assert pool.poll(TEN) == ScalingDecision(0, "flow", active=False)
    pool.others = (WorkerGroup("broken", 4, speed=math.nan), WorkerGroup("gone", -3, speed=2.0))
    assert pool.poll(TEN).workers == 15


def test_workers_that_start_are_not_asked_for_twice_but_are_replaced_when_their_start_has_failed() -> None:
    pool = Pool(0, cold_start=5.0)
    pool.ready = 0
    course = pool.run(PoolDemand(backlog=8.0, waiting=8, largest=0.4, fast=2.0, slow=2.0), 200)
    first, later = course[: int(MIN_PATIENCE) - 1], course[-1]
    assert set(first) == {5}
    assert later == 10
    pool.ready = 5
    assert pool.run(PoolDemand(fast=2.0, slow=2.0), 70)[-1] <= 5


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 1e12, math.nan, math.inf])
def test_a_clock_that_jumps_is_no_time(jump: float) -> None:
    pool = Pool(1)
    pool.poll(TEN)
    before = pool.now
    assert pool.poll(PoolDemand(fast=2.0, slow=2.0), jump).workers == 15
    if not math.isfinite(pool.now):
        pool.now = before
    assert set(pool.run(PoolDemand(fast=2.0, slow=2.0), 30)) == {15}
    assert pool.run(PoolDemand(fast=2.0, slow=2.0), 60)[-1] == 4


def test_a_dead_proxy_takes_its_part_of_the_sum_with_it_and_the_pool_holds_for_the_window() -> None:
    pool = Pool(1)
    pool.poll(TEN)
    half = PoolDemand(fast=5.0, slow=5.0)
    assert set(pool.run(half, 55)) == {15}
    assert pool.run(half, 10)[-1] == 9


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -5.0])
def test_demand_that_is_no_number_counts_as_none(bad: float) -> None:
    decision = Pool(3).poll(PoolDemand(bad, -4, bad, bad, bad))
    assert decision == ScalingDecision(3, "hold", active=True)
    decision = Pool(3).poll(replace(TEN, largest=bad, backlog=bad))
    assert decision.workers == 15


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"minimum": 5, "maximum": 4}, "maximum is 4 and minimum is 5"),
        ({"minimum": -1}, "minimum is -1"),
        ({"maximum": 0}, "maximum is 0"),
        ({"slo": 0.0}, "slo is 0.0"),
        ({"slo": math.nan}, "slo is nan"),
        ({"utilization": 1.1}, "utilization is 1.1"),
        ({"window": math.inf}, "window is inf"),
        ({"reserve": -0.1}, "reserve is -0.1"),
    ],
)
def test_rules_that_make_no_sense_are_refused(fields: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replace(RULES, **fields)  # type: ignore[arg-type]


seconds = st.floats(0, 1e6)
demands = st.builds(
    PoolDemand, seconds, st.integers(0, 10**6), st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e4)
)
anything = st.floats(allow_nan=True, allow_infinity=True)
hostile = st.builds(PoolDemand, anything, st.integers(-5, 10**7), anything, anything, anything)
rules = st.builds(
    lambda minimum, more, slo, rho: ScalingRules(minimum, max(minimum + more, 1), slo, rho),
    st.integers(0, 8),
    st.integers(0, 60),
    st.floats(0.01, 100),
    st.floats(0.1, 1.0),
)


@given(rules, st.integers(0, 70), st.lists(st.tuples(hostile, anything), max_size=20))
@settings(deadline=None)
def test_every_decision_is_between_least_and_most(given_rules, begin, course):
    pool = Pool(begin, given_rules)
    for demand, step in course:
        workers = pool.poll(demand, step).workers
        assert given_rules.minimum <= workers <= given_rules.maximum
        assert len(pool.state.needs) <= WINDOW_STEPS + 1
        if not math.isfinite(pool.now):
            pool.now = 0.0


@given(rules, demands, st.integers(0, 64))
def test_never_below_what_the_slo_needs(given_rules: ScalingRules, demand: PoolDemand, begin: int) -> None:
    pool = Pool(begin, given_rules)
    needed = demand.backlog / max(given_rules.slo - demand.largest, demand.largest)
    items = demand.waiting + begin
    enough = min(math.ceil(min(needed, 1e7) - 1e-6), items, given_rules.maximum)
    assert pool.poll(demand).workers >= enough


@given(demands, demands, st.integers(0, 64))
def test_more_demand_never_asks_for_fewer_workers(one: PoolDemand, more: PoolDemand, begin: int) -> None:
    # Equal largest items, and the slow average in proportion: a burst is one by the ratio of both averages.
    factor = 1.0 + (more.waiting % 7)
    both = replace(
        one,
        backlog=one.backlog + more.backlog,
        waiting=one.waiting + more.waiting,
        fast=one.fast * factor,
        slow=one.slow * factor,
    )
    assert Pool(begin).poll(both).workers >= Pool(begin).poll(one).workers


@given(st.floats(0.05, 40), st.integers(0, 1 << 30), st.booleans(), st.integers(5, 120))
@settings(deadline=None, max_examples=20)
def test_constant_load_with_noise_does_not_make_the_pool_swing(work, seed, at_the_edge, period):
    rng = random.Random(seed)
    if at_the_edge:  # exactly a whole number of workers
        work = 0.7 * max(round(work / 0.7), 1)
    pool = Pool(0)
    course = []
    for second in range(1200):
        # Noise of single seconds, or a slow wave, which is the worst for a window.
        noise = rng.uniform(0.9, 1.1) if seed % 2 else (0.9, 1.1)[second // period % 2]
        flow = work * noise
        course.append(pool.poll(PoolDemand(fast=flow, slow=flow)).workers)
    changes = [b - a for a, b in zip(course, course[1:], strict=False) if b != a]
    assert all(change > 0 for change in changes)
    assert course[-1] <= math.ceil(work * 1.1 / 0.7) + 1e-9
