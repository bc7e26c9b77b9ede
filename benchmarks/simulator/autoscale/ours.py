"""Triptych's own policy: what the proxies' autoscaler runs once a second, over the real proxy's demand."""

from __future__ import annotations

from triptych.config.scaling import ScalingConfig
from triptych.proxy.scaling.policy import Observation, ScalingState, decide
from triptych.proxy.scaling.pools import EncoderPool
from triptych.scaling import ScalingRules
from triptych.simulator.autoscale.scaler import PoolView
from triptych.simulator.cluster.cluster import SimulatedCluster
from triptych.simulator.cluster.loop import VirtualLoop

_DEFAULTS = ScalingConfig()
#: The default of --encoder-slo.
ENCODER_SLO = _DEFAULTS.encoder_slo


class WorkSeconds:
    """`decide` with the flags' defaults; zero workers are allowed. The cold start is known, not learnt."""

    def __init__(self, least: int, most: int, cold_start: float) -> None:
        self._rules = ScalingRules(least, most, ENCODER_SLO, window=_DEFAULTS.scale_window)
        self._cold_start = cold_start
        self._state: ScalingState | None = None
        self._pool: EncoderPool | None = None

    def attach(self, loop: VirtualLoop, cluster: SimulatedCluster) -> None:
        self._pool = EncoderPool(self._rules, cluster.known, cluster.proxy.dispatcher.jobs)

    def desired(self, seen: PoolView) -> int:
        assert self._pool is not None, "not attached"
        state = self._state or ScalingState.holding(seen.workers)
        demand, groups = self._pool.demand(seen.now), self._pool.groups(state.workers)
        observation = Observation(seen.now, demand, groups, self._cold_start)
        self._state, decision = decide(observation, state, self._rules)
        return decision.workers
