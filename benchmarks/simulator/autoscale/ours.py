"""Triptych's own policy: the function that the proxies run, once a second, over the real proxy's demand."""

from __future__ import annotations

import math

from triptych.proxy.scaling.policy import Observation, ScalingRules, ScalingState, decide
from triptych.scaling import PoolDemand, WorkerGroup
from triptych.simulator.autoscale.scaler import PoolView
from triptych.simulator.cluster.cluster import SimulatedCluster
from triptych.simulator.cluster.loop import VirtualLoop

#: The default of --encoder-slo.
ENCODER_SLO = 2.0


class WorkSeconds:
    """`triptych.proxy.scaling.policy.decide` on demand in seconds of work. Zero workers are allowed."""

    def __init__(self, least: int, most: int, cold_start: float, slo: float = ENCODER_SLO) -> None:
        self._rules = ScalingRules(least, most, slo)
        self._cold_start = cold_start
        self._state = ScalingState.holding(1)
        self._fast = self._slow = 0.0
        self._jobs = 0.0

    def attach(self, loop: VirtualLoop, cluster: SimulatedCluster) -> None:
        self._runner = cluster.proxy.dispatcher.jobs

    def desired(self, seen: PoolView) -> int:
        group = WorkerGroup("", seen.ready, seen.starting)
        observation = Observation(seen.now, self._demand(seen), (group,), self._cold_start)
        self._state, decision = decide(observation, self._state, self._rules)
        return decision.workers

    def _demand(self, seen: PoolView) -> PoolDemand:
        table = self._runner.table
        loads = table._loads
        costs = [loads.cost(job, "") for job in table._jobs.values()]
        made = self._runner._metrics.registry.get_sample_value(
            "triptych_encoder_jobs_total", {"kind": "first"}
        )
        new, self._jobs = (made or 0.0) - self._jobs, made or 0.0
        arrived = new * loads._model.work(None) if new else 0.0
        self._fast += (arrived - self._fast) * (1 - math.exp(-1 / 6))
        self._slow += (arrived - self._slow) * (1 - math.exp(-1 / 60))
        return PoolDemand(sum(costs), seen.waiting, max(costs, default=0.0), self._fast, self._slow)
