from __future__ import annotations

import pytest

from support.data.items import bare_plan
from support.data.job_events import job_planned, job_ready
from support.data.pd_events import pd_admitted, pd_finished
from triptych.base.scaling import PoolDemand, ScalingRules, WorkerGroup
from triptych.base.types import ItemPlan
from triptych.proxy.encoders.arrivals import Arrivals
from triptych.proxy.encoders.job import EncoderSlot, JobState
from triptych.proxy.encoders.job_table import EncoderJobTable
from triptych.proxy.encoders.work_model import WorkModel
from triptych.proxy.events import (
    Fetched,
    LookedUp,
    WorkerEvent,
    lost,
)
from triptych.proxy.pd.work import PDWork, PromptWork, kv_share, outstanding_prompts
from triptych.proxy.ports import PDLoadReport
from triptych.proxy.requests.lifecycle import Lifecycle
from triptych.proxy.scaling.policy import Observation, ScalingState, decide
from triptych.proxy.scaling.pools import PDDemand, item_demand, pd_demand, total_demand

SPACE = "n"


class Proxy:
    """The jobs of one proxy at one encoder; an item of n rows takes n tenths of a second."""

    def __init__(self, *, learnt: bool = True, flow_control: bool = True) -> None:
        self.model = WorkModel()
        for rows in (1, 2, 4) if learnt else ():
            self.model.learn(rows, 0.1 * rows, "k")
        self.table = EncoderJobTable(1 << 30, model=self.model, flow_control=flow_control)
        self.table.set_encoders([EncoderSlot("e", (SPACE,), 999, 2, "k")])
        self.arrived = Arrivals()

    def want(self, key: str, request: str = "r", *, re_encode: bool = False) -> None:
        job, joined = self.table.want(key, request, SPACE, re_encode=re_encode)
        if not joined and not re_encode:
            self.arrived.of("").add(job, 100.0)

    def plan(self, rows: int) -> None:
        for job in self.table.pump(0.0):
            if job.state is JobState.PLANNING:
                self.table.planned(job.try_id, bare_plan(job.mm_hash, rows))
                self.arrived.of("").resize(job, rows, 100.0)

    def demand(self, unbound: int = 0) -> PoolDemand:
        return item_demand(
            self.table.outstanding(),
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


class PDWorkers:
    """A pool of PD workers with 16 slots, each of which takes 0.1 ms for a token of a prompt."""

    def __init__(self, *, told: bool = True) -> None:
        self.learnt, self.held = PromptWork(), PDDemand()
        for tokens in (100, 40_000) if told else ():
            self.learnt.model.learn(tokens, tokens / 10_000)

    def demand(self, work: PDWork, now: float) -> PoolDemand:
        held = self.held.poll(work, 16, now)
        return pd_demand(held, work.prompts, self.learnt, now=now, kind="", slo=2.0)


def pd_workers(demand: PoolDemand, ready: int) -> int:
    seen = Observation(0.0, demand, [WorkerGroup("k", ready)])
    return decide(seen, ScalingState.holding(ready), ScalingRules(1, 9, 2.0))[1].workers


def at_workers(*prompts: tuple[int | None, str]) -> PDWork:
    """Requests with prompts of these token counts, not prefilled yet, at a worker or at none."""
    unplaced = sum(not address for _, address in prompts)
    return PDWork(len(prompts), unplaced, 0.0, 0.0, outstanding_prompts(prompts))


def test_long_prompts_that_wait_ask_for_pd_workers_though_few_requests_are_in_flight() -> None:
    three = at_workers((30_000, "a"), (30_000, "a"), (30_000, "a"))
    assert pd_workers(PDWorkers().demand(three, 0.0), 1) == 3  # 3 s each, one of them is being computed
    assert pd_workers(PDWorkers().demand(at_workers((30_000, "a")), 0.0), 1) == 1  # cannot be split
    assert pd_workers(PDWorkers().demand(at_workers(*[(500, "a")] * 14), 0.0), 1) == 1  # 0.7 s in all


def test_prompts_that_keep_arriving_ask_for_the_pd_workers_that_they_fill() -> None:
    pool = PDWorkers()
    for second in range(300):
        pool.learnt.arrived.of("").count(20_000, float(second))
        demand = pool.demand(at_workers((20_000, "a")), float(second))
    assert pd_workers(demand, 1) == 3  # 2 s of prompts in each, workers filled to 0.7: 2.9
    burst = PDWorkers()
    for _ in range(6):
        burst.learnt.arrived.of("").count(20_000, 0.0)
    assert pd_workers(burst.demand(PDWork(), 0.0), 1) == 3  # as many, averaged over 6 s


def test_a_prompt_of_unknown_size_is_an_average_one_and_a_request_without_a_worker_waits() -> None:
    pool = PDWorkers()
    demand = pool.demand(at_workers((None, ""), (None, "a")), 0.0)
    assert demand.waiting == 1
    assert demand.backlog == pytest.approx(2 * pool.learnt.model.work(None))


def test_while_no_worker_tells_what_prompts_take_requests_alone_count() -> None:
    pool = PDWorkers(told=False)
    for second in range(600):
        pool.learnt.arrived.of("").count(30_000, float(second))
        demand = pool.demand(at_workers(*[(30_000, "a")] * 8), float(second))
    assert demand == PoolDemand(0.0, 0, 0.0, *[pytest.approx(0.5, rel=1e-3)] * 2)


def test_pd_workers_follow_their_requests() -> None:
    pool = PDWorkers()
    for second in range(600):
        demand = pool.demand(PDWork(40), float(second))
    assert pd_workers(demand, 1) == 4  # 40 of 16 at once, each filled to 0.7: 3.57


def test_requests_that_wait_for_a_pd_worker_ask_for_one_at_once() -> None:
    pool = PDWorkers()
    pool.demand(PDWork(16), 0.0)
    assert pd_workers(pool.demand(PDWork(40, 24), 1.0), 1) == 3  # all of them at once: 2.5


def test_full_kv_caches_ask_for_a_pd_worker_unless_one_request_alone_fills_them() -> None:
    pool, report = PDWorkers(), PDLoadReport(3, 1, 0.8, 0.0, 0.0)
    assert kv_share(4, report) == pytest.approx(0.8) and kv_share(1, report) == pytest.approx(0.2)
    assert kv_share(1, PDLoadReport(1, 0, 0.8, 0.0, 0.0)) == kv_share(4, None) == 0.0
    for second in range(600):
        demand = pool.demand(PDWork(4, 0, 0.8), float(second))
    assert pd_workers(demand, 1) == 2


def test_a_pd_pool_keeps_its_size_between_prompts_that_come_now_and_then_and_shrinks_after_them() -> None:
    pool, rules, sizes = PDWorkers(), ScalingRules(1, 9, 2.0), []
    state = ScalingState.holding(1)
    for second in range(900):
        work = at_workers(*[(30_000, "a")] * 3) if second < 600 and second % 20 < 3 else PDWork()
        seen = Observation(float(second), pool.demand(work, float(second)), [WorkerGroup("k", state.workers)])
        state, decision = decide(seen, state, rules)
        sizes.append(decision.workers)
    assert set(sizes[:600]) == {3} and sizes[-1] == 1


def observed(model: PromptWork, machine: Lifecycle, *events: WorkerEvent) -> None:
    for event in events:
        model.observe(machine, event, "k", 100.0)
        machine.deliver(event)


def test_a_prompt_arrives_once_however_many_workers_it_is_at_and_its_last_one_tells_what_it_takes() -> None:
    learnt, machine = PromptWork(), Lifecycle()
    machine.deliver(Fetched({}, 0.0))
    admitted = pd_admitted(1, (5,) * 60, [])
    assert machine.awaits_prefill and machine.prompt_tokens is None
    observed(learnt, machine, admitted)
    machine.deliver(lost(1))
    late = pd_finished(1, 60, 1, work=9.0)
    observed(learnt, machine, pd_admitted(2, (5,) * 60), late)
    assert machine.awaits_prefill and machine.prompt_tokens == 60
    assert learnt.arrived.rates(100.0)[1].patches == pytest.approx(1.0)
    assert not learnt.model.kinds
    machine.tokens(2, 0, [7], "")
    assert not machine.awaits_prefill
    observed(learnt, machine, pd_finished(2, 60, 1, work=7.0, reason="abort"))
    assert not learnt.model.kinds
    observed(learnt, machine, pd_finished(3, 60, 1, work=0.5))
    assert learnt.model.work(60, "k") == pytest.approx(0.5)


def test_a_prompt_whose_item_is_still_encoded_waits_for_no_pd_worker_unless_it_has_no_room() -> None:
    machine = Lifecycle()
    machine.deliver(Fetched({"a": ""}, 0.0))
    machine.deliver(LookedUp({}))
    item = ItemPlan("a", SPACE, "image", 4, 1, "float32", 300)
    machine.deliver(job_planned("a", item))
    assert machine.awaits_prefill and machine.prompt_tokens == 300
    machine.deliver(pd_admitted(1, (5,) * 310, [(0, 300)]))
    assert not machine.awaits_prefill
    machine.deliver(job_ready("a", item))
    assert machine.awaits_prefill and machine.prompt_tokens == 310
