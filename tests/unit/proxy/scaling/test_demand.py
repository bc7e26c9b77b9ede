from __future__ import annotations

import pytest

from triptych.base.scaling import PoolDemand, ScalingRules, WorkerGroup
from triptych.base.types import ItemPlan
from triptych.proxy.encoders.job import EncoderSlot, StartPlan
from triptych.proxy.encoders.job_table import EncoderJobTable
from triptych.proxy.encoders.loads import ArrivedItems, WorkModel
from triptych.proxy.scaling.policy import Observation, ScalingState, decide
from triptych.proxy.scaling.pools import PDDemand, encoder_demand, total_demand

SPACE = "n"


class Proxy:
    """The jobs of one proxy at one encoder; an item of n rows takes n tenths of a second."""

    def __init__(self, *, learnt: bool = True, flow_control: bool = True) -> None:
        self.model = WorkModel()
        for rows in (1, 2, 4) if learnt else ():
            self.model.learn(rows, 0.1 * rows, "k")
        self.table = EncoderJobTable(1 << 30, model=self.model, flow_control=flow_control)
        self.table.set_encoders([EncoderSlot("e", (SPACE,), 999, 2, "k")])
        self.arrived = ArrivedItems()

    def want(self, key: str, request: str = "r", *, re_encode: bool = False) -> None:
        job, joined = self.table.want(key, request, SPACE, re_encode=re_encode)
        if not joined and not re_encode:
            self.arrived.add(job, 100.0)

    def plan(self, rows: int) -> None:
        for action in self.table.pump(0.0):
            if isinstance(action, StartPlan):
                plan = ItemPlan(action.job.mm_hash, SPACE, "image", rows, 1, "float32", rows)
                self.table.planned(action.job.try_id, plan)
                self.arrived.resize(action.job, rows, 100.0)

    def demand(self, unbound: int = 0) -> PoolDemand:
        return encoder_demand(
            self.table.outstanding,
            self.arrived,
            self.model,
            now=100.0,
            kind="k",
            jobs=len(self.table),
            unbound=unbound,
        )


def test_items_cost_what_their_sizes_say_once_they_are_known() -> None:
    proxy = Proxy()
    for key in "abc":
        proxy.want(key)
    average = proxy.model.work(None, "k")
    assert proxy.demand().backlog == pytest.approx(3 * average)
    proxy.plan(rows=4)
    proxy.table.admit("r")
    demand = proxy.demand()
    assert demand.backlog == pytest.approx(1.2)
    assert demand.largest == pytest.approx(0.4)
    assert demand.waiting == 3
    assert demand.fast == pytest.approx(1.2 / 6)
    assert demand.slow == pytest.approx(1.2 / 60)


def test_a_request_that_joins_a_job_is_no_further_demand() -> None:
    once, twice = Proxy(), Proxy()
    once.want("a")
    twice.want("a")
    twice.want("a", "other")
    assert once.demand() == twice.demand()


def test_a_re_encode_is_outstanding_and_does_not_arrive() -> None:
    proxy = Proxy()
    proxy.want("a", re_encode=True)
    demand = proxy.demand()
    assert demand.backlog > 0.1 and demand.waiting == 1
    assert demand.fast == demand.slow == 0.0


def test_items_without_room_at_a_pd_worker_ask_for_no_encoder_and_keep_the_last_one() -> None:
    proxy = Proxy()
    for index in range(50):
        proxy.want(f"k{index}")
    proxy.plan(rows=4)
    demand = proxy.demand()
    assert demand.waiting == 0
    assert 0.0 < demand.backlog < 0.1
    unchecked = Proxy(flow_control=False)
    unchecked.want("a")
    unchecked.plan(rows=4)
    assert unchecked.demand().waiting == 1


def test_what_a_tower_works_on_is_outstanding_but_does_not_wait() -> None:
    proxy = Proxy()
    for key in "abc":
        proxy.want(key)
    proxy.plan(rows=1)
    proxy.table.admit("r")
    proxy.table.pump(0.0)
    demand = proxy.demand()
    assert demand.waiting == 1
    assert demand.backlog == pytest.approx(0.3)


def test_requests_that_no_encoder_has_ever_been_there_for_wait_too() -> None:
    assert Proxy(learnt=False).demand(unbound=2).waiting == 2
    demand = Proxy().demand(unbound=2)
    assert demand.waiting == 2
    assert demand.backlog > 0.1


def test_while_no_cost_is_known_items_count_and_their_seconds_do_not() -> None:
    proxy = Proxy(learnt=False)
    for index in range(100):
        proxy.want(f"k{index}")
    demand = proxy.demand()
    assert demand.waiting == 100
    assert demand.fast == demand.slow == demand.largest == 0.0
    rules = ScalingRules(0, 50, 1.0)
    _, decision = decide(Observation(0.0, demand), ScalingState.holding(0), rules)
    assert decision.workers == 1


def test_the_demand_of_several_proxies_is_their_sum_and_the_largest_item_of_all() -> None:
    both = [PoolDemand(1.0, 2, 0.5, 0.25, 0.125), PoolDemand(2.0, 3, 4.0, 0.5, 0.25)]
    assert total_demand(both) == PoolDemand(3.0, 5, 4.0, 0.75, 0.375)
    assert total_demand([]) == PoolDemand()


def pd_workers(demand: PoolDemand, ready: int) -> int:
    seen = Observation(0.0, demand, [WorkerGroup("k", ready)])
    return decide(seen, ScalingState.holding(ready), ScalingRules(1, 9, 1.0))[1].workers


def test_pd_workers_follow_their_requests() -> None:
    pool = PDDemand()
    for second in range(600):
        demand = pool.poll(40, 0, 16, float(second))
    assert pd_workers(demand, 1) == 4  # 40 of 16 at once, each filled to 0.7: 3.57


def test_requests_that_wait_for_a_pd_worker_ask_for_one_at_once() -> None:
    pool = PDDemand()
    pool.poll(16, 0, 16, 0.0)
    demand = pool.poll(40, 24, 16, 1.0)
    assert pd_workers(demand, 1) == 3  # all of them at once: 2.5
