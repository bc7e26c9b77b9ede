"""What a scaler sees of a pool of encoders and decides: the interface of all policies, and Triptych's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from triptych.base.config.scaling import ScalingConfig
from triptych.base.scaling import ScalingRules
from triptych.proxy.scaling.policy import Observation, ScalingState, decide
from triptych.proxy.scaling.pools import EncoderPool
from triptych.simulator.cluster.cluster import SimulatedCluster

_DEFAULTS = ScalingConfig()
#: The default of --encoder-slo.
ENCODER_SLO = _DEFAULTS.encoder_slo


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool once a second.

    `busy`: seconds that each ready encoder's tower has worked since its start, by address. `outstanding`:
    items that the proxy waits for, `waiting` those of them that no tower works on; a
    request that has found no encoder ever counts as one. `requests`: taken in
    since the start.
    """

    now: float
    starting: int
    busy: Mapping[str, float] = field(default_factory=dict)
    outstanding: int = 0
    waiting: int = 0
    requests: int = 0

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


class WorkSeconds:
    """Triptych's policy: what the proxies' autoscaler runs once a second, over the real proxy's demand.

    `decide` with the flags' defaults; zero workers are allowed. The cold start is known, not learnt.
    """

    def __init__(self, least: int, most: int, cold_start: float) -> None:
        self._rules = ScalingRules(least, most, ENCODER_SLO, window=_DEFAULTS.scale_window)
        self._cold_start = cold_start
        self._state: ScalingState | None = None
        self._pool: EncoderPool | None = None

    def attach(self, cluster: SimulatedCluster) -> None:
        self._pool = EncoderPool(self._rules, cluster.known, cluster.proxy.dispatcher.jobs)

    def desired(self, seen: PoolView) -> int:
        assert self._pool is not None, "not attached"
        state = self._state or ScalingState.holding(seen.workers)
        demand, groups = self._pool.demand(seen.now), self._pool.groups(state.workers)
        observation = Observation(seen.now, demand, groups, self._cold_start)
        self._state, decision = decide(observation, state, self._rules)
        return decision.workers
