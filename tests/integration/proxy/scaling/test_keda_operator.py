"""The scaler before a client that behaves as KEDA's operator and the HPA: the rules of both together."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from grpc import aio

from support.keda.hpa import Behavior
from support.keda.operator import KedaOperator, ScaledObject
from support.waiting import until
from triptych.base.scaling import ScalingDecision
from triptych.proxy.scaling.keda import ScalerServer

#: As docs/autoscaling.md recommends.
PROMPT = Behavior(down_stabilization=0.0, up_pods=100)
#: KEDA's seconds in one of ours.
SPEED = 150.0
ENCODERS = {"pool": "encoder", "scalerAddress": "proxy:8002"}


class Decisions:
    """Decisions that the test sets."""

    def __init__(self, decision: ScalingDecision | None = None) -> None:
        self.now: ScalingDecision | None = decision
        self._listeners: list[Callable[[], None]] = []

    def decision(self, pool: str) -> ScalingDecision | None:
        return self.now

    def subscribe(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def set(self, workers: int, *, active: bool) -> None:
        self.now = ScalingDecision(workers, "flow", active)
        for listener in self._listeners:
            listener()


class Deployment:
    """Replicas that are there at once."""

    def __init__(self, replicas: int = 0) -> None:
        self.replicas = replicas
        self.steps: list[int] = []

    def scale(self, replicas: int) -> None:
        self.replicas = replicas
        self.steps.append(replicas)


@contextlib.asynccontextmanager
async def operator(
    decisions: Decisions, target: Deployment, spec: ScaledObject
) -> AsyncIterator[tuple[KedaOperator, ScalerServer]]:
    server = ScalerServer(decisions)
    await server.start("127.0.0.1", 0)
    try:
        async with (
            aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
            KedaOperator(spec, target, channel, SPEED).running() as running,
        ):
            yield running, server
    finally:
        await server.stop()


def spec(**changes: object) -> ScaledObject:
    given: dict[str, object] = {"most": 20, "polling_interval": 5.0, "cooldown_period": 30.0}
    return ScaledObject(ENCODERS, **(given | {"behavior": PROMPT} | changes))  # type: ignore[arg-type]


async def test_a_pushed_true_scales_from_zero_before_any_poll_and_the_hpa_follows_the_decision() -> None:
    decisions, target = Decisions(ScalingDecision(0, "idle", False)), Deployment()
    slow = spec(polling_interval=1e9)
    async with operator(decisions, target, slow) as (client, _):
        await until(lambda: client.pushed == [False], "the state at the opening")
        assert target.steps == []
        decisions.set(6, active=True)
        await until(lambda: target.replicas == 6, "the six workers")
        assert target.steps == [1, 6]
        assert [who for _, who, _ in client.log] == ["keda", "hpa"]


async def test_a_pushed_false_scales_nothing_and_the_cooldown_ends_at_zero() -> None:
    decisions, target = Decisions(ScalingDecision(4, "flow", True)), Deployment(4)
    async with operator(decisions, target, spec()) as (client, _):
        await until(lambda: client.pushed == [True], "the state at the opening")
        decisions.set(0, active=False)
        await until(lambda: client.pushed == [True, False], "the push")
        await until(lambda: target.replicas == 0, "the end of the cooldown")
    # The HPA's least is 1; only KEDA goes below, after its cooldown.
    assert target.steps == [1, 0]
    (when_hpa, _, _), (when_keda, who, _) = client.log
    assert who == "keda" and when_keda - when_hpa < 60.0


async def test_a_proxy_that_leaves_costs_the_stream_two_seconds_and_not_a_minute() -> None:
    decisions, target = Decisions(ScalingDecision(1, "flow", True)), Deployment(1)
    async with operator(decisions, target, spec()) as (client, server):
        await until(lambda: client.pushed == [True], "the stream")
        await server.stop()
        await until(lambda: client.pauses, "the end of the stream")
        assert client.pauses[0] == 2.0
