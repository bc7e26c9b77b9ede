"""The chart's ScaledObjects under the rules of KEDA and the HPA: what is not known ends no worker."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from grpc import aio
from prometheus_client import CollectorRegistry

from support.keda.hpa import Behavior
from support.keda.operator import KedaOperator, ScaledObject
from support.kubernetes.chart import Manifest, render
from support.kubernetes.manifests import of_kind
from support.scaling_board import BoardData, MemoryBoard
from support.waiting import until
from triptych.base.metrics import ProxyMetrics
from triptych.base.scaling import PoolDemand, ScalingRules, WorkerGroup
from triptych.base.types import WorkerInfo
from triptych.proxy.scaling.autoscaler import LEARN_SECONDS, TERM, Autoscaler
from triptych.proxy.scaling.keda import ScalerServer
from triptych.proxy.workers import KnownWorkers, Worker

#: KEDA's seconds in one of ours.
SPEED = 150.0
WORKERS = 8
VALUES = {
    "autoscaling": {"engine": "keda"},
    "encoderPools": [{"name": "a", "autoscale": {"min": 0, "max": 9}}],
    "pdPools": [{"name": "b", "autoscale": {"max": 9}}],
}
#: Every pool that the chart lets KEDA scale: it refuses one beside colocated pools, which have no decision.
OBJECTS = {
    one["spec"]["triggers"][0]["metadata"]["pool"]: one for one in of_kind(render(VALUES), "ScaledObject")
}


def test_the_pools_that_are_tested_are_all_that_the_chart_scales() -> None:
    assert set(OBJECTS) == {"encoder", "pd"}
    assert {one["spec"]["scaleTargetRef"]["name"] for one in OBJECTS.values()} == {
        *("triptych-encoder-a", "triptych-pd-b")
    }


def scaled_object_of(manifest: Manifest) -> ScaledObject:
    """The manifest's fields, without the scaler's address; an error for a trigger of another type."""
    spec = manifest["spec"]
    (trigger,) = spec["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("external-push", "AverageValue")
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    (up,) = behavior["scaleUp"]["policies"]
    fallback = spec.get("fallback")
    return ScaledObject(
        {name: value for name, value in trigger["metadata"].items() if name != "scalerAddress"},
        least=spec["minReplicaCount"],
        most=spec["maxReplicaCount"],
        polling_interval=spec["pollingInterval"],
        cooldown_period=spec["cooldownPeriod"],
        behavior=Behavior(
            down_stabilization=behavior["scaleDown"]["stabilizationWindowSeconds"],
            up_pods=up["value"],
            up_period=up["periodSeconds"],
        ),
        fallback=fallback["replicas"] if fallback else None,
        failure_threshold=fallback["failureThreshold"] if fallback else 3,
    )


@dataclass
class Deployment:
    """Replicas that are there at once."""

    replicas: int = WORKERS
    steps: list[int] = field(default_factory=list)

    def scale(self, replicas: int) -> None:
        self.replicas = replicas
        self.steps.append(replicas)


@dataclass
class IdlePool:
    """A pool without any work, as a proxy sees it."""

    name: str
    rules: ScalingRules
    kind: str = "k"

    def demand(self, now: float) -> PoolDemand:
        return PoolDemand()

    def groups(self, wanted: int) -> list[WorkerGroup]:
        return [WorkerGroup("k", wanted)]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Proxy:
    """A real autoscaler at a board in memory, behind a real scaler."""

    def __init__(self, data: BoardData, clock: Clock, manifest: Manifest) -> None:
        spec = manifest["spec"]
        self.name = spec["triggers"][0]["metadata"]["pool"]
        self.clock, self.workers = clock, KnownWorkers()
        rules = ScalingRules(spec["minReplicaCount"], spec["maxReplicaCount"], 2.0)
        pools = {self.name: IdlePool(self.name, rules)}
        metrics = ProxyMetrics(CollectorRegistry())
        self.scaler = Autoscaler(MemoryBoard(data), pools, self.workers, metrics, "p", clock)

    async def look(self, seconds: float = 1.0) -> int | None:
        self.clock.now += seconds
        await self.scaler.look(self.name)
        decision = self.scaler.decision(self.name)
        return None if decision is None else decision.workers

    def registered(self) -> None:
        for index in range(WORKERS):
            info = WorkerInfo(f"h:{index}", self.name, f"i{index}", "m", "m", kind="k")
            self.workers.workers[self.name, info.address] = Worker(info)


@contextlib.asynccontextmanager
async def keda(proxy: Proxy, target: Deployment, manifest: Manifest) -> AsyncIterator[KedaOperator]:
    server = ScalerServer(proxy.scaler)
    await server.start("127.0.0.1", 0)
    try:
        async with (
            aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            KedaOperator(scaled_object_of(manifest), target, channel, SPEED).running() as operator,
        ):
            yield operator
    finally:
        await server.stop()


@pytest.mark.parametrize("pool", OBJECTS)
async def test_eight_workers_stay_eight_while_the_store_is_away(pool: str) -> None:
    clock, target = Clock(), Deployment()
    data = BoardData(clock)
    proxy = Proxy(data, clock, OBJECTS[pool])
    proxy.registered()
    await proxy.look()
    assert await proxy.look(LEARN_SECONDS) == WORKERS
    async with keda(proxy, target, OBJECTS[pool]) as operator:
        await until(lambda: operator.reads > 2, "reads of the decision")
        data.down = True
        assert await proxy.look(TERM) is None
        await until(lambda: operator.failures > 9, "far more failed reads than any threshold")
        data.down = False
        assert await proxy.look() == WORKERS
        await until(lambda: operator.failures == 0, "reads of the decision again")
    assert target.steps == []


@pytest.mark.parametrize("pool", OBJECTS)
async def test_with_a_decision_for_fewer_the_workers_do_go(pool: str) -> None:
    clock, target = Clock(), Deployment()
    proxy = Proxy(BoardData(clock), clock, OBJECTS[pool])
    least = OBJECTS[pool]["spec"]["minReplicaCount"]
    async with keda(proxy, target, OBJECTS[pool]):
        await proxy.look()
        assert await proxy.look(LEARN_SECONDS) == least
        await until(lambda: target.replicas == least, "the minimum")
