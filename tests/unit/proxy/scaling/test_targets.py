"""Targets: models, kinds and roles that are scaled apart, from the flag to the decisions."""

from __future__ import annotations

from collections import defaultdict

import pytest
from prometheus_client import CollectorRegistry

from support.clock import Clock
from support.fakes.scaling_board import BoardData, MemoryBoard
from triptych.base.config import ScalingConfig, check_scaling
from triptych.base.errors import ConfigError
from triptych.base.metrics import ProxyMetrics
from triptych.base.scaling import (
    PoolDemand,
    ScalingDecision,
    ScalingRules,
    ScalingTarget,
    SharedRules,
    WorkerGroup,
    parse_scaled,
)
from triptych.base.types import WorkerInfo
from triptych.proxy.scaling.autoscaler import LEARN_SECONDS, Autoscaler
from triptych.proxy.scaling.keda import metric_name
from triptych.proxy.scaling.pools import EncoderPool, cheapest_first
from triptych.proxy.workers import KnownWorkers, Worker


def targets(*scale: str) -> list[str]:
    return [one.target.name for one in ScalingConfig(scale=",".join(scale)).targets()]


def test_a_target_is_what_its_text_says() -> None:
    (one,) = ScalingConfig(scale="encoder; model=qwen3 ;kind=cuda NVIDIA L4;min=1;max=8;price=0.4").targets()
    assert one.target == ScalingTarget("encoder", "qwen3", "cuda NVIDIA L4")
    assert (one.rules.minimum, one.rules.maximum, one.rules.slo, one.price) == (1, 8, 2.0, 0.4)
    (two,) = ScalingConfig(scale="pd;role=decode;max=4").targets()
    assert (two.rules.minimum, two.rules.slo) == (1, 0.1)
    assert targets("pd;model=a;max=1", "pd;model=b;max=1") == ["pd;model=a", "pd;model=b"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("encoders;max=2", "begin with encoder or pd"),
        ("encoder;max", "as name=value"),
        ("encoder;size=3", "as name=value"),
        ("encoder;max=2;max=3", "max is given twice"),
        ("encoder;role=decode;max=2", "only pd has roles"),
        ("pd;role=both;max=2", "prefill and decode"),
        ("pd;min=0;max=2", "never go to zero"),
        ("encoder;min=3;max=2", "maximum must be at least minimum"),
        ("encoder;model=a", "maximum is 0"),
        ("encoder;max=x", "give a whole number"),
        ("encoder;max=2;price=0", "give a number above 0"),
        ("encoder;max=2;slo=nan", "slo"),
        ("encoder;model=a;max=1,encoder;max=1", "count the same workers"),
        ("encoder;model=a;kind=k;max=1,encoder;model=a;max=1", "count the same workers"),
        ("pd;role=prefill;max=1,pd;model=a;max=1", "count the same workers"),
        (",".join(f"pd;model=m{index};max=1" for index in range(33)), "give 32 or fewer"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_remedy(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match="--scale") as error:
        check_scaling(ScalingConfig(scale=text))
    assert named in str(error.value)


def test_a_whole_pool_and_a_part_of_it_are_refused_together() -> None:
    with pytest.raises(ConfigError, match="count the same workers"):
        check_scaling(ScalingConfig(max_encoders=3, scale="encoder;model=a;max=2"))


def test_a_metric_has_a_name_that_kubernetes_takes_and_no_other_target_has() -> None:
    names = [
        metric_name(ScalingTarget("encoder", *parts))
        for parts in ((), ("Org/Model",), ("org-model",), ("m" * 300,), ("m" * 301,), ("a", "b"), ("a b",))
    ]
    assert names[0] == "triptych-encoder-workers"
    assert len(set(names)) == len(names)
    assert all(
        len(name) <= 80 and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for name in names
    )


def test_the_cheapest_kind_is_first_and_nearly_equal_ones_keep_their_order() -> None:
    assert cheapest_first(["a", "b", "c"], {"a": 3.0, "b": 1.0, "c": 2.0}) == ["b", "c", "a"]
    assert cheapest_first(["a", "b"], {"a": 1.0, "b": 0.9}) == ["a", "b"]
    assert cheapest_first(["b", "a"], {"a": 0.9, "b": 1.0}) == ["b", "a"]


class Boards:
    """A board for each target."""

    def __init__(self, clock: Clock) -> None:
        self._boards: defaultdict[str, MemoryBoard] = defaultdict(lambda: MemoryBoard(BoardData(clock)))

    async def publish(self, proxy_id: str, pool: str, demand: PoolDemand, term: float) -> list[PoolDemand]:
        return await self._boards[pool].publish(proxy_id, pool, demand, term)

    async def withdraw(self, proxy_id: str, pool: str) -> None:
        await self._boards[pool].withdraw(proxy_id, pool)

    async def decision(self, pool: str) -> ScalingDecision | None:
        return await self._boards[pool].decision(pool)

    async def announce(self, pool: str, decision: ScalingDecision, term: float) -> bool:
        return await self._boards[pool].announce(pool, decision, term)

    async def agree(
        self, pool: str, own: ScalingRules, expected: int | None, term: float, *, newest: bool = False
    ) -> SharedRules:
        return await self._boards[pool].agree(pool, own, expected, term, newest=newest)


class Asked(EncoderPool):
    """Encoders of a kind that take these seconds for an item; the test says how many items arrive."""

    asked = 0.0
    seconds: float

    def demand(self, now: float) -> PoolDemand:
        work = self.asked * self.seconds
        return PoolDemand(0.1 if work else 0.0, int(work > 0), self.seconds, work, work)

    def came(self) -> bool:
        return self.asked > 0.0

    def cost(self) -> float:
        return self.price * self.seconds

    def _speed(self, kind: str) -> float:
        return self.seconds / SECONDS[kind]


SECONDS = {"cpu": 1.0, "gpu": 0.1}


class Fleet:
    """One proxy that scales what the texts say; a worker is there as soon as it is asked for."""

    def __init__(self, *scale: str) -> None:
        self.clock, self.workers = Clock(1000.0), KnownWorkers()
        self.pools: dict[str, Asked] = {}
        for text in scale:
            pool = Asked(parse_scaled(text, 60.0, 2.0), self.workers, dispatcher=None)  # type: ignore[arg-type]
            pool.seconds = SECONDS[pool.target.kind or "cpu"]
            self.pools[pool.name] = pool
        self.registry = CollectorRegistry()
        metrics = ProxyMetrics(self.registry)
        self.scaler = Autoscaler(Boards(self.clock), dict(self.pools), self.workers, metrics, "p", self.clock)
        self.broken: set[str] = set()

    async def run(self, seconds: int, **items: float) -> list[int]:
        """So many items arrive a second for each model; the workers that there should be of each target."""
        for _ in range(seconds):
            self.clock.now += 1.0
            for pool in self.pools.values():
                pool.asked = items.get(pool.target.model, 0.0)
            for name in self.scaler._in_order():
                await self.scaler.poll(name)
            self._start()
        return [self._of(name) for name in self.pools]

    def _of(self, name: str) -> int:
        decision = self.scaler.decision(name)
        return -1 if decision is None else decision.workers

    def _start(self) -> None:
        self.workers.workers.clear()
        for name, pool in self.pools.items():
            for index in range(0 if pool.target.kind in self.broken else self._of(name)):
                kind = pool.target.kind or "cpu"
                info = WorkerInfo(
                    f"{name}:{index}", "encoder", f"{name}{index}", "k", pool.target.model, kind=kind
                )
                self.workers.workers["encoder", info.address] = Worker(info)


async def test_two_models_are_scaled_apart() -> None:
    fleet = Fleet("encoder;model=a;max=9", "encoder;model=b;max=9")
    await fleet.run(int(LEARN_SECONDS) + 1)
    assert await fleet.run(3, a=2.8) == [4, 0]
    assert await fleet.run(3, a=2.8, b=0.7) == [4, 1]
    shown = fleet.scaler.of_pool("encoder")
    assert shown is not None and (shown.workers, shown.active) == (5, True)
    assert shown.reason == "a 4: flow, b 1: flow"
    assert fleet.scaler.of_pool("pd") is None
    assert await fleet.run(120, b=1.4) == [0, 2]
    labels = {"pool": "encoder", "model": "b", "kind": "", "role": ""}
    assert fleet.registry.get_sample_value("triptych_target_workers_desired", labels) == 2.0
    assert fleet.registry.get_sample_value("triptych_encoder_workers_desired") == 2.0


async def test_of_two_kinds_the_one_with_cheaper_items_grows_first_and_the_other_takes_the_rest() -> None:
    dear_gpu = Fleet("encoder;model=m;kind=gpu;max=4;price=20", "encoder;model=m;kind=cpu;max=4")
    await dear_gpu.run(int(LEARN_SECONDS) + 1)
    assert await dear_gpu.run(3, m=0.7) == [0, 1]
    assert dear_gpu.scaler.decision("encoder;model=m;kind=gpu").active is False
    assert await dear_gpu.run(3, m=2.8) == [0, 4]
    assert await dear_gpu.run(3, m=9.8) == [1, 4]  # 14 CPUs' work: 4 of them, and the 10 of a GPU
    assert await dear_gpu.run(150, m=2.1) == [0, 4]
    cheap_gpu = Fleet("encoder;model=m;kind=cpu;max=4", "encoder;model=m;kind=gpu;max=2;price=5")
    await cheap_gpu.run(int(LEARN_SECONDS) + 1)
    assert await cheap_gpu.run(3, m=9.8) == [0, 2]
    assert await cheap_gpu.run(3, m=16.8) == [4, 2]  # 24 CPUs' work: 20 on GPUs


async def test_what_a_kind_that_does_not_start_should_have_done_the_next_one_does() -> None:
    fleet = Fleet("encoder;model=m;kind=cpu;max=4", "encoder;model=m;kind=gpu;max=4;price=50")
    fleet.broken = {"cpu"}
    await fleet.run(int(LEARN_SECONDS) + 1)
    assert await fleet.run(30, m=2.8) == [4, 0]
    assert (await fleet.run(40, m=2.8))[1] == 1


def test_a_kind_that_is_scaled_apart_is_never_taken_for_the_own_one() -> None:
    workers = KnownWorkers()
    info = WorkerInfo("h:1", "encoder", "i", "k", "m", kind="gpu")
    workers.workers["encoder", "h:1"] = Worker(info)
    pool = Asked(parse_scaled("encoder;model=m;kind=cpu;max=4", 60.0, 2.0), workers, dispatcher=None)  # type: ignore[arg-type]
    pool.seconds = 0.1
    assert pool.groups(2, {"gpu": 0}) == [
        WorkerGroup("cpu", 0, 2),
        WorkerGroup("gpu", 0, 0, 1.0, apart=True),
    ]
    assert pool.groups(2)[1].ready == 1
