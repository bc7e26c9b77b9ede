"""Scaling policies: Triptych's own, Kubernetes' on CPU use and on a queue's length (KEDA), and Knative's.

Parameters of Kubernetes' are the defaults of
kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale: a sync every 15 s, a tolerance of 10 %,
at most four pods or as many as there are more in 15 s, and the highest recommendation of the last 300 s
before pods are taken away.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from triptych.base.config.proxy import ScalingConfig
from triptych.proxy.scaling.policy import Observation, ScalingState, decide
from triptych.proxy.scaling.pools import ScaledPool, make_pools
from triptych_bench.simulator.cluster.cluster import SimulatedCluster

#: The default of --encoder-slo.
ENCODER_SLO = ScalingConfig().encoder_slo


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool once a second.

    `busy`: seconds that each ready encoder's tower has worked since its start, by address. `outstanding`:
    items that the proxy waits for, `waiting` those of them that no tower works on; a
    request that has found no encoder ever counts as one. Of a PD pool these are requests.
    """

    now: float
    starting: int
    busy: Mapping[str, float] = field(default_factory=dict)
    outstanding: int = 0
    waiting: int = 0

    @property
    def ready(self) -> int:
        return len(self.busy)

    @property
    def workers(self) -> int:
        """Ready and starting: what an orchestrator calls replicas."""
        return self.ready + self.starting


class Scaler(Protocol):
    """A policy with its own timers and windows; asked once a second, from second 0 on."""

    def desired(self, seen: PoolView) -> int:
        """Workers that the pool should have now."""


@dataclass(frozen=True, slots=True)
class FixedSize:
    """A static pool."""

    workers: int

    def desired(self, seen: PoolView) -> int:
        return self.workers


class ByDemand:
    """Triptych's policy: what the proxies' autoscaler runs once a second, over the real proxy's demand.

    `decide` with the flags' defaults beside `config`. The cold start is known, not learnt.
    """

    def __init__(self, pool: str, config: ScalingConfig, cold_start: float) -> None:
        self._name, self._config = pool, config
        self._cold_start = cold_start
        self._state: ScalingState | None = None
        self._pool: ScaledPool | None = None

    def attach(self, cluster: SimulatedCluster) -> None:
        self._pool = make_pools(self._config, cluster.known, cluster.proxy.dispatcher)[self._name]

    def desired(self, seen: PoolView) -> int:
        assert self._pool is not None, "not attached"
        state = self._state or ScalingState.holding(seen.workers)
        demand, groups = self._pool.demand(seen.now), self._pool.groups(state.workers)
        observation = Observation(seen.now, demand, groups, self._cold_start, self._pool.came())
        self._state, decision = decide(observation, state, self._pool.rules)
        return decision.workers


def work_seconds(minimum: int, maximum: int, cold_start: float) -> ByDemand:
    """The product's encoder pool; zero workers are allowed."""
    return ByDemand("encoder", ScalingConfig(min_encoders=minimum, max_encoders=maximum), cold_start)


def pd_work(maximum: int, cold_start: float) -> ByDemand:
    """The product's PD pool."""
    return ByDemand("pd", ScalingConfig(max_pd_workers=maximum), cold_start)


SYNC_SECONDS = 15.0
TOLERANCE = 0.1
STABILIZATION_SECONDS = 300.0
#: --metric-resolution of metrics-server, and scrape interval of Prometheus' operator in production-stack.
SCRAPE_SECONDS = 15.0
#: Seconds from a scrape to the sync that reads it: the two loops are not in step.
METRICS_DELAY = 5.0
#: Most new pods in 15 s; as many as there are, if those are more.
SCALE_UP_PODS = 4


class _Controller(ABC):
    """An HPA without its metric: scrapes and syncs, limits of scaling up, stabilization, bounds."""

    def __init__(self, minimum: int, maximum: int) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._recent: deque[tuple[float, int]] = deque()
        #: What the pool has until the first sync.
        self._desired: int | None = None
        self._next_scrape, self._next_sync = 0.0, METRICS_DELAY

    @abstractmethod
    def _scrape(self, seen: PoolView) -> None:
        """Reads the metric."""

    @abstractmethod
    def _wanted(self, seen: PoolView, current: int) -> int:
        """What the last scrape asks for, where there are `current` pods."""

    def desired(self, seen: PoolView) -> int:
        if self._desired is None:
            self._desired = max(seen.workers, 1)
        if seen.now >= self._next_scrape:
            self._next_scrape += SCRAPE_SECONDS
            self._scrape(seen)
        if seen.now >= self._next_sync:
            self._next_sync += SYNC_SECONDS
            current = max(seen.workers, 1)
            self._desired = self._stabilized(seen.now, current, self._wanted(seen, current))
        return self._desired

    def _stabilized(self, now: float, current: int, wanted: int) -> int:
        """What the pool is set to."""
        self._recent.append((now, wanted))
        while self._recent[0][0] < now - STABILIZATION_SECONDS:
            self._recent.popleft()
        highest = max(count for _, count in self._recent)
        allowed = max(wanted, min(highest, current))
        allowed = min(allowed, max(current + SCALE_UP_PODS, 2 * current))
        return min(max(allowed, self._minimum), self._maximum)


class CpuPercent(_Controller):
    """An HPA on CPU use, target 70 %: the share of its time that a worker's tower is at work.

    It cannot scale to zero or from zero: `least` is at least 1. Pods that are not ready, or not for a whole
    scrape, count as idle when pods are added and are left out, or count as at the target, when they are
    taken away, as its documentation says.
    """

    def __init__(self, minimum: int, maximum: int, target: float = 0.7) -> None:
        super().__init__(max(minimum, 1), maximum)
        self._target = target
        self._busy: Mapping[str, float] = {}
        self._use: Mapping[str, float] = {}

    def _scrape(self, seen: PoolView) -> None:
        before, self._busy = self._busy, dict(seen.busy)
        self._use = {
            address: (busy - before[address]) / SCRAPE_SECONDS
            for address, busy in seen.busy.items()
            if address in before
        }

    def _wanted(self, seen: PoolView, current: int) -> int:
        use = [share for address, share in self._use.items() if address in seen.busy]
        if not use:
            return current
        ratio = sum(use) / len(use) / self._target
        unmeasured = seen.ready - len(use)
        if ratio > 1:
            pods, filled = current, sum(use)
        else:
            pods, filled = seen.ready, sum(use) + unmeasured * self._target
        # What is not measured may weaken the change, never turn it round.
        weakened = filled / pods / self._target
        if abs(1 - weakened) <= TOLERANCE or (weakened > 1) != (ratio > 1):
            return current
        wanted = math.ceil(weakened * pods)
        return max(wanted, current) if ratio > 1 else min(wanted, current)


class QueueLength(_Controller):
    """production-stack's rule: one worker for every five items that wait, through KEDA and Prometheus.

    docs.vllm.ai/projects/production-stack, "Autoscaling with KEDA": threshold 5 (an average value), polling
    15 s, at least 1 replica. The queue is that of all workers together.
    """

    def __init__(self, maximum: int, threshold: float = 5.0) -> None:
        super().__init__(1, maximum)
        self._threshold = threshold
        self._waiting = 0

    def _scrape(self, seen: PoolView) -> None:
        self._waiting = seen.waiting

    def _wanted(self, seen: PoolView, current: int) -> int:
        ratio = self._waiting / (self._threshold * current)
        return current if abs(1 - ratio) <= TOLERANCE else math.ceil(self._waiting / self._threshold)


STABLE_SECONDS, PANIC_SECONDS = 60, 6
PANIC_THRESHOLD = 2.0
UTILIZATION = 0.7
TICK_SECONDS = 2.0
MAX_SCALE_DOWN = 2.0


class Concurrency:
    """Pods for the items in the proxy and in the workers, averaged over the windows.

    It scales to zero after a stable window without an item, and from zero at the first one, which the
    activator holds.
    """

    def __init__(self, minimum: int, maximum: int, concurrency: float = 8.0) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._per_pod = concurrency * UTILIZATION
        self._seconds: deque[int] = deque(maxlen=STABLE_SECONDS)
        self._panic_until = -math.inf
        self._panic_pods = 0
        self._next_tick = 0.0
        self._desired = max(minimum, 1)

    def desired(self, seen: PoolView) -> int:
        self._seconds.append(seen.outstanding)
        woken = seen.outstanding and not self._desired
        if woken or seen.now >= self._next_tick:
            self._next_tick = seen.now + TICK_SECONDS
            self._desired = min(max(self._wanted(seen), self._minimum), self._maximum)
        return self._desired

    def _wanted(self, seen: PoolView) -> int:
        ready = max(seen.ready, 1)
        stable = self._pods(list(self._seconds), ready)
        panic = self._pods(list(self._seconds)[-PANIC_SECONDS:], ready)
        if panic / ready >= PANIC_THRESHOLD:
            if seen.now > self._panic_until:
                self._panic_pods = 0
            self._panic_until = seen.now + STABLE_SECONDS
        if seen.now <= self._panic_until:
            self._panic_pods = max(self._panic_pods, stable, panic, seen.ready)
            return self._panic_pods
        return stable

    def _pods(self, window: list[int], ready: int) -> int:
        wanted = math.ceil(sum(window) / len(window) / self._per_pod)
        # No more than halved; the last pod goes once the whole window is empty.
        return wanted if not any(window) else max(wanted, math.floor(ready / MAX_SCALE_DOWN), 1)
