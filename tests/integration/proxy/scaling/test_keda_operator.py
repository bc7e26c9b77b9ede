"""The scaler before a client that behaves as KEDA's operator and the HPA: the rules of both together."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from grpc import aio

from support.keda.hpa import Behavior, PodAutoscaler
from support.keda.operator import KedaOperator, ScaledObject
from support.waiting import until
from triptych.proxy.scaling.keda import ScalerServer
from triptych.scaling import ScalingDecision

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


async def test_a_fallback_replaces_the_pods_that_there_are_which_is_why_the_chart_has_none() -> None:
    decisions, target = Decisions(), Deployment(3)
    async with operator(decisions, target, spec()) as (client, _):
        await until(lambda: client.failures > 2 * client.spec.failure_threshold, "failed reads")
        assert target.steps == []
    for replicas in (5, 1):
        async with operator(decisions, target, spec(fallback=replicas)):
            await until(lambda replicas=replicas: target.replicas == replicas, "the fallback")
    assert target.steps == [5, 1]


async def test_a_fallback_of_zero_replicas_ends_the_workers_which_is_why_the_docs_forbid_it() -> None:
    target = Deployment(3)
    async with operator(Decisions(), target, spec(fallback=0)):
        await until(lambda: target.replicas == 0, "the end of the workers")


async def test_a_proxy_that_leaves_costs_the_stream_two_seconds_and_not_a_minute() -> None:
    decisions, target = Decisions(ScalingDecision(1, "flow", True)), Deployment(1)
    async with operator(decisions, target, spec()) as (client, server):
        await until(lambda: client.pushed == [True], "the stream")
        await server.stop()
        await until(lambda: client.pauses, "the end of the stream")
        assert client.pauses[0] == 2.0


def replicas_over_time(hpa: PodAutoscaler, current: int, totals: list[float | None]) -> list[int]:
    found = []
    for look, total in enumerate(totals):
        current = hpa.replicas(15.0 * look, current, total, 1.0)
        found.append(current)
    return found


@pytest.mark.parametrize(
    "current, total, found",
    [
        (1, 2, 2),
        (9, 10, 10),
        # The tolerance of 10 %: from ten workers on one more or less is not followed.
        (20, 21, 20),
        (10, 11, 10),
        (20, 22, 20),
        (20, 23, 23),
        (10, 9.5, 10),
        # Up to the most, and never below one; zero is KEDA's.
        (5, 1000, 40),
        (5, 0, 1),
        (0, 7, 0),
        (5, None, 5),
    ],
)
def test_the_hpa_sets_the_sum_over_the_target_outside_its_tolerance(
    current: int, total: float | None, found: int
) -> None:
    assert PodAutoscaler(1, 40, PROMPT).replicas(0.0, current, total, 1.0) == found


def test_by_default_the_hpa_adds_four_pods_or_doubles_and_holds_for_five_minutes() -> None:
    hpa = PodAutoscaler(1, 100)
    assert replicas_over_time(hpa, 1, [40.0] * 5) == [5, 10, 20, 40, 40]
    held = [hpa.replicas(75.0 + 15.0 * look, 40, 2.0, 1.0) for look in range(30)]
    assert held[:18] == [40] * 18
    assert 2 in held


def test_with_our_settings_the_hpa_follows_the_decision_both_ways_at_once() -> None:
    hpa = PodAutoscaler(1, 100, PROMPT)
    assert replicas_over_time(hpa, 1, [40.0, 40.0, 8.0, 12.0, 3.0]) == [40, 40, 8, 12, 3]
