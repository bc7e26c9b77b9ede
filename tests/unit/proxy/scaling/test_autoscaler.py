"""The autoscaler's loop over a board that the test holds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from support.clock import Clock
from triptych.base.metrics import ProxyMetrics
from triptych.base.scaling import (
    PoolDemand,
    ScalingDecision,
    ScalingRules,
    SharedRules,
    WorkerGroup,
    parse_scaled,
)
from triptych.base.types import WorkerInfo
from triptych.proxy.scaling.autoscaler import LEARN_SECONDS, TERM, Autoscaler
from triptych.proxy.scaling.pools import ScaledPool
from triptych.proxy.workers import KnownWorkers, Worker
from triptych.store.control import StoreUnavailable


@dataclass
class FakeBoard:
    """The store's board; `ahead` is what another proxy announces between a read and an announcement."""

    demands: dict[str, PoolDemand] = field(default_factory=dict)
    in_force: ScalingDecision | None = None
    ahead: list[ScalingDecision] = field(default_factory=list)
    down: bool = False
    #: The rules are of a version that this one cannot read.
    foreign: bool = False

    async def publish(self, proxy_id: str, pool: str, demand: PoolDemand, term: float) -> list[PoolDemand]:
        if self.down:
            raise StoreUnavailable("switched off")
        self.demands[proxy_id] = demand
        return list(self.demands.values())

    async def withdraw(self, proxy_id: str, pool: str) -> None:
        self.demands.pop(proxy_id, None)

    async def decision(self, pool: str) -> ScalingDecision | None:
        return self.in_force

    async def announce(self, pool: str, decision: ScalingDecision, term: float) -> bool:
        if self.ahead:
            self.in_force = self.ahead.pop()
            return False
        self.in_force = decision
        return True

    async def agree(
        self, pool: str, own: ScalingRules, expected: int | None, term: float, *, newest: bool = False
    ) -> SharedRules:
        return SharedRules(None if self.foreign else own, 1, supported=True)


class FakePool(ScaledPool):
    """Workers of one kind; the test says what is asked of them."""

    def __init__(self, workers: KnownWorkers, name: str = "encoder", price: float = 1.0) -> None:
        scaled = parse_scaled(f"{name};max=9;price={price}", 60.0, 2.0)
        super().__init__(scaled, workers, dispatcher=None)  # type: ignore[arg-type]
        self.kind = self.kind or "k"
        self.now_asked = PoolDemand()

    def came(self) -> None:
        return None

    def cost(self) -> float:
        return self.price

    def groups(self, desired: int, others: Mapping[str, int] | None = None) -> list[WorkerGroup]:
        return [WorkerGroup("k", desired)]

    def demand(self, now: float) -> PoolDemand:
        return self.now_asked


class Proxy:
    """One proxy's autoscaler at a board."""

    def __init__(self, board: FakeBoard, name: str = "p1", clock: Clock | None = None) -> None:
        self.clock = clock or Clock(1000.0)
        self.workers = KnownWorkers()
        self.pool = FakePool(self.workers)
        self.registry = CollectorRegistry()
        metrics = ProxyMetrics(self.registry)
        self.scaler = Autoscaler(board, {"encoder": self.pool}, self.workers, metrics, name, self.clock)

    async def knows(self) -> Proxy:
        """This proxy once it has seen that nobody has decided."""
        await self.scaler.poll("encoder")
        self.clock.now += LEARN_SECONDS
        return self

    async def poll(self, demand: PoolDemand) -> ScalingDecision | None:
        self.clock.now += 1.0
        self.pool.now_asked = demand
        await self.scaler.poll("encoder")
        return self.scaler.decision("encoder")

    def joins(self, incarnation: str) -> None:
        info = WorkerInfo(f"h:{incarnation}", "encoder", incarnation, "m", "m", kind="k")
        self.workers.workers["encoder", info.address] = Worker(info)
        self.scaler.workers_changed()


FOUR = PoolDemand(fast=2.7, slow=2.7)


async def test_every_proxy_decides_on_the_sum_and_all_agree() -> None:
    board, clock = FakeBoard(), Clock(1000.0)
    first, second = await Proxy(board, "p1", clock).knows(), Proxy(board, "p2", clock)
    await first.poll(FOUR)
    await second.poll(FOUR)
    both = await first.poll(FOUR)
    assert both is not None and both.workers == 8  # 5.4 / 0.7
    assert await second.poll(FOUR) == both


async def test_a_new_proxy_keeps_what_is_in_force_for_a_whole_window() -> None:
    board = FakeBoard(in_force=ScalingDecision(7, "flow", active=True))
    proxy = Proxy(board)
    for _ in range(59):
        decision = await proxy.poll(PoolDemand(fast=0.5, slow=0.5))
        assert decision is not None and decision.workers == 7
    for _ in range(5):
        decision = await proxy.poll(PoolDemand(fast=0.5, slow=0.5))
    assert decision is not None and decision.workers == 1


async def test_a_new_cluster_keeps_the_workers_that_are_there_once_they_have_registered() -> None:
    proxy = Proxy(FakeBoard())
    assert await proxy.poll(FOUR) is None
    await proxy.knows()
    for name in "abc":
        proxy.joins(name)
    assert await proxy.poll(PoolDemand()) == ScalingDecision(3, "hold", active=True)


async def test_what_a_proxy_keeps_is_told_before_a_decision_on_more_and_once_for_one_on_as_many() -> None:
    told: list[tuple[str, int | None]] = []

    class ToldBoard(FakeBoard):
        async def publish(
            self, proxy_id: str, pool: str, demand: PoolDemand, term: float
        ) -> list[PoolDemand]:
            told.append(("kept", demand.kept))
            return await super().publish(proxy_id, pool, demand, term)

        async def announce(self, pool: str, decision: ScalingDecision, term: float) -> bool:
            told.append(("decided", decision.workers))
            return await super().announce(pool, decision, term)

    proxy = await Proxy(ToldBoard()).knows()
    told.clear()
    await proxy.poll(FOUR)
    assert told == [("kept", None), ("kept", 4), ("decided", 4)]
    told.clear()
    await proxy.poll(FOUR)
    assert told == [("kept", 4), ("decided", 4)]


async def test_a_decision_that_another_proxy_has_made_meanwhile_is_not_undone() -> None:
    board = FakeBoard(in_force=ScalingDecision(1, "flow", active=True))
    proxy = Proxy(board)
    await proxy.poll(PoolDemand(fast=0.5, slow=0.5))
    board.ahead = [ScalingDecision(6, "backlog", active=True)]
    for _ in range(59):
        decision = await proxy.poll(PoolDemand(fast=0.5, slow=0.5))
        assert decision == ScalingDecision(6, "hold", active=True)
    # But a lower one is that this proxy has not seen to be enough for a whole window.
    board.in_force = ScalingDecision(4, "consolidate", active=True)
    decision = await proxy.poll(PoolDemand(fast=0.5, slow=0.5))
    assert decision is not None and decision.workers == 6
    for _ in range(2):
        decision = await proxy.poll(PoolDemand(fast=0.5, slow=0.5))
    assert decision is not None and decision.workers == 1
    board.ahead = [ScalingDecision(1, "flow", active=True)]
    decision = await proxy.poll(FOUR)
    assert decision is not None and decision.workers == 4


async def test_rules_that_cannot_be_read_leave_the_decision_to_others() -> None:
    board = FakeBoard(in_force=ScalingDecision(7, "flow", active=True), foreign=True)
    assert await Proxy(board).poll(FOUR) == board.in_force == ScalingDecision(7, "flow", active=True)


async def test_while_the_store_is_down_the_decision_stays_until_its_term_ends() -> None:
    board = FakeBoard()
    proxy = await Proxy(board).knows()
    before = await proxy.poll(FOUR)
    changes: list[ScalingDecision | None] = []
    proxy.scaler.subscribe(lambda: changes.append(proxy.scaler.decision("encoder")))
    board.down = True
    assert await proxy.poll(PoolDemand()) == before
    for _ in range(int(TERM) + 1):
        await proxy.poll(PoolDemand())
    assert proxy.scaler.decision("encoder") is None and changes == [None]
    board.down = False
    after = await proxy.poll(FOUR)
    assert after == before and changes == [None, after]


async def test_a_store_that_gives_no_reply_in_time_is_logged_with_that_reason(caplog, monkeypatch) -> None:
    board = FakeBoard()

    async def silent(*_: object) -> list[PoolDemand]:
        raise TimeoutError  # as asyncio.timeout raises it: without a word

    monkeypatch.setattr(board, "publish", silent)
    await Proxy(board).scaler.poll("encoder")
    assert [record.getMessage() for record in caplog.records] == [
        "pools keep their workers, the store does not answer: no reply in time"
    ]


async def test_a_proxy_that_stops_takes_its_demand_with_it() -> None:
    board = FakeBoard()
    other, proxy = await Proxy(board).knows(), await Proxy(board, "p2").knows()
    await other.poll(FOUR)
    await proxy.poll(FOUR)
    assert board.demands.keys() == {"p1", "p2"}
    proxy.scaler.start()
    await proxy.scaler.stop()
    assert board.demands.keys() == {"p1"}


async def test_a_poll_that_ends_late_leaves_no_demand_behind_a_proxy_that_stops() -> None:
    class SlowBoard(FakeBoard):
        async def publish(
            self, proxy_id: str, pool: str, demand: PoolDemand, term: float
        ) -> list[PoolDemand]:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                await super().publish(proxy_id, pool, demand, term)
            return []

    board = SlowBoard()
    proxy = Proxy(board)
    proxy.scaler.start()
    await asyncio.sleep(0)
    await proxy.scaler.stop()
    for _ in range(5):
        await asyncio.sleep(0)
    assert board.demands == {}


async def test_listeners_hear_of_changes_and_of_nothing_else() -> None:
    proxy = await Proxy(FakeBoard()).knows()
    heard: list[int] = []
    proxy.scaler.subscribe(lambda: heard.append(1))
    for demand in (PoolDemand(), PoolDemand(), FOUR, FOUR, FOUR):
        await proxy.poll(demand)
    assert len(heard) == 2


async def test_a_pool_that_is_not_scaled_has_no_decision() -> None:
    assert Proxy(FakeBoard()).scaler.decision("pd") is None


async def test_the_time_to_a_registration_is_learnt_and_shown() -> None:
    proxy = await Proxy(FakeBoard()).knows()
    proxy.scaler.workers_changed()
    await proxy.poll(PoolDemand())
    await proxy.poll(PoolDemand(waiting=1))
    proxy.clock.now += 4.0
    proxy.joins("a")
    labels = {"pool": "encoder", "kind": "k"}
    assert proxy.registry.get_sample_value("triptych_cold_start_seconds", labels) == 4.0
    assert proxy.registry.get_sample_value("triptych_encoder_workers_desired") == 1.0
    counted = {"pool": "encoder", "reason": "flow"}
    assert proxy.registry.get_sample_value("triptych_scale_decisions_total", counted) == 1.0
