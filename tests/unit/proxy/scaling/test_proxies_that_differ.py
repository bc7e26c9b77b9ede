"""Several proxies whose settings and knowledge differ: one decision, which does not go to and fro."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from support.clock import Clock
from support.fakes.scaling_board import BoardData, MemoryBoard
from triptych.base.metrics import ProxyMetrics
from triptych.base.scaling import PoolDemand, ScalingRules, ScalingTarget, WorkerGroup
from triptych.base.types import WorkerInfo
from triptych.proxy.scaling.autoscaler import LEARN_SECONDS, TERM, Autoscaler
from triptych.proxy.workers import KnownWorkers, Worker

RULES = ScalingRules(1, 8, 2.0, window=20.0)
NONE, EIGHT, TWO = PoolDemand(), PoolDemand(fast=5.6, slow=5.6), PoolDemand(fast=1.4, slow=1.4)


@dataclass
class Pool:
    """A pool as one proxy sees it: two workers of another kind, and what it has learnt of their speed."""

    rules: ScalingRules
    speed: float
    asked: PoolDemand = NONE
    name: str = "encoder"
    kind: str = "own"
    target: ScalingTarget = ScalingTarget("encoder")
    workers: KnownWorkers = field(default_factory=KnownWorkers)

    @property
    def known(self) -> list[tuple[str, str]]:
        return list(self.workers.workers)

    def cost(self) -> float:
        return 1.0

    def came(self) -> None:
        return None

    def demand(self, now: float) -> PoolDemand:
        return self.asked

    def groups(self, wanted: int, rivals: Mapping[str, int]) -> list[WorkerGroup]:
        others = [WorkerGroup("other", 2, speed=self.speed)] if self.speed else []
        return [WorkerGroup("own", wanted), *others]


class Proxy:
    """A real autoscaler with its own settings, at the shared board."""

    def __init__(self, data: BoardData, name: str, rules: ScalingRules = RULES, speed: float = 0.0) -> None:
        self.pool = Pool(rules, speed)
        self.workers = self.pool.workers
        metrics = ProxyMetrics(CollectorRegistry())
        self.scaler = Autoscaler(
            MemoryBoard(data), {"encoder": self.pool}, self.workers, metrics, name, data.clock
        )

    async def poll(self, demand: PoolDemand) -> None:
        self.pool.asked = demand
        await self.scaler.poll("encoder")

    def registered(self, count: int) -> None:
        for index in range(count):
            info = WorkerInfo(f"h:{index}", "encoder", f"i{index}", "m", "m", kind="own")
            self.workers.workers["encoder", info.address] = Worker(info)


@dataclass
class Cluster:
    data: BoardData
    clock: Clock

    async def run(self, proxies: Sequence[Proxy], demand: PoolDemand, seconds: float) -> list[int]:
        """Each proxy looks once in a second, one after another; what was announced meanwhile."""
        begun = len(self.data.announced)
        for _ in range(int(seconds)):
            for proxy in proxies:
                self.clock.now += 1.0 / len(proxies)
                # The first proxy has all demand, so that the sum is the same for all.
                await proxy.poll(demand if proxy is proxies[0] else NONE)
        return self.data.announced[begun:]


@pytest.fixture
def cluster() -> Cluster:
    return made()


def made() -> Cluster:
    clock = Clock(1000.0)
    return Cluster(BoardData(clock), clock)


CHANGES = [
    {"maximum": 4},
    {"minimum": 3},
    {"slo": 8.0},
    {"window": 5.0},
    {"utilization": 0.9},
    {"reserve": 1.0},
    {"maximum": 4, "window": 40.0},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
async def test_proxies_of_two_settings_announce_one_number(cluster, change):
    changed = replace(RULES, **change)  # type: ignore[arg-type]
    old, new = Proxy(cluster.data, "old"), Proxy(cluster.data, "new", changed)
    await cluster.run([old], EIGHT, 10)
    await cluster.run([old, new], EIGHT, 60)
    assert await cluster.run([old, new], EIGHT, 120) == []
    assert cluster.data.ruled == [RULES, changed], "the newest settings win, once"


async def test_a_rolling_update_goes_over_to_the_new_rules_once(cluster: Cluster) -> None:
    data, changed = cluster.data, replace(RULES, maximum=4)
    old = [Proxy(data, f"old-{index}") for index in range(3)]
    await cluster.run(old, EIGHT, 60)
    running = list(old)
    for index in range(3):
        running.append(Proxy(data, f"new-{index}", changed))
        await cluster.run(running, EIGHT, 15)
        running[0].scaler.drain()
        await cluster.run(running, EIGHT, 15)
        await running.pop(0).scaler.stop()
    await cluster.run(running, EIGHT, 30)
    assert data.announced == [8, 4]
    assert data.ruled == [RULES, changed]


async def test_an_old_proxy_that_starts_again_hands_its_rules_over_when_it_has_gone(cluster: Cluster) -> None:
    changed = replace(RULES, maximum=4)
    new, old = Proxy(cluster.data, "new", changed), Proxy(cluster.data, "old")
    await cluster.run([new], EIGHT, 20)
    await cluster.run([new, old], EIGHT, 20)
    old.scaler.drain()
    await cluster.run([new, old], EIGHT, 2 * TERM)
    await cluster.run([new], EIGHT, 2 * TERM)
    assert cluster.data.ruled == [changed, RULES, changed]
    assert cluster.data.announced[-3:] == [4, 8, 4]


async def test_the_rules_outlive_a_store_that_was_away_and_one_that_was_emptied(cluster: Cluster) -> None:
    data, changed = cluster.data, replace(RULES, maximum=4)
    old, new = Proxy(data, "old"), Proxy(data, "new", changed)
    await cluster.run([old, new], EIGHT, 20)
    before = len(data.ruled)
    data.down = True
    await cluster.run([old, new], EIGHT, 3 * TERM)
    data.down = False
    assert await cluster.run([old, new], EIGHT, 20) == []
    data.flush()
    assert await cluster.run([old, new], EIGHT, 20) == []
    assert data.ruled[before:] == []


async def test_a_decrease_has_held_for_its_window_whoever_announces_it(cluster: Cluster) -> None:
    """The proxy that began later has seen the peak, too."""
    first, second = Proxy(cluster.data, "first"), Proxy(cluster.data, "second")
    await cluster.run([first], EIGHT, 30)
    await cluster.run([first, second], EIGHT, 10)
    assert await cluster.run([first, second], TWO, RULES.window - 2) == []
    assert await cluster.run([first, second], TWO, 5) == [3]


async def test_a_decision_of_one_who_knew_nothing_does_not_undo_what_others_keep(cluster: Cluster) -> None:
    """The store is emptied, and a proxy that has just begun is the first one to come back to it."""
    old, new = Proxy(cluster.data, "old"), Proxy(cluster.data, "new")
    await cluster.run([old], EIGHT, 30)
    cluster.data.flush()
    await cluster.run([new], NONE, LEARN_SECONDS + 3)
    assert cluster.data.announced[-1] == 1, "it knew of no worker"
    await cluster.run([old, new], TWO, 3)
    assert cluster.data.announced[-1] == 8


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.lists(st.sampled_from([*CHANGES, {}]), min_size=2, max_size=4),
    st.lists(st.sampled_from([0.0, 0.5, 2.5]), min_size=4, max_size=4),
)
async def test_under_steady_demand_any_proxies_come_to_rest(seed, changes, speeds):
    chance, cluster = random.Random(seed), made()
    proxies = [
        Proxy(cluster.data, f"p{index}", replace(RULES, **change), speed)  # type: ignore[arg-type]
        for index, (change, speed) in enumerate(zip(changes, speeds, strict=False))
    ]
    for _ in range(4):
        level = chance.choice([0.3, 1.4, 3.0, 5.6, 9.0])
        demand = PoolDemand(fast=level, slow=level, backlog=chance.choice([0.0, level]), waiting=2)
        order = chance.sample(proxies, len(proxies))
        await cluster.run(order, demand, 100)
        assert await cluster.run(order, demand, 100) == []
    assert len(cluster.data.ruled) <= len(proxies)


async def test_what_one_proxy_begins_to_keep_is_known_before_another_goes_below_it() -> None:
    rising = PoolDemand(fast=4.2, slow=4.2)
    for seconds in range(int(RULES.window) - 3, int(RULES.window) + 5):
        cluster = made()
        proxies = [Proxy(cluster.data, "slow"), Proxy(cluster.data, "fast", speed=2.5)]
        await cluster.run(proxies, EIGHT, 30)
        await cluster.run(proxies, TWO, seconds)
        assert 8 not in await cluster.run(proxies, rising, 10), "it went down and up again"
