"""Kubernetes' HorizontalPodAutoscaler with one external metric of type AverageValue, as a pure state machine.

Its rules: desired = ceil(sum / target), nothing within a tolerance of 10 %, at most 4 pods or 100 % more in
15 s, and down only to the largest recommendation of the last 300 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: Seconds between two looks of the controller.
SYNC = 15.0
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Behavior:
    """`behavior` of the HPA; the defaults are Kubernetes'."""

    #: scaleDown.stabilizationWindowSeconds
    down_stabilization: float = 300.0
    #: scaleUp.policies: the larger of both is allowed in each period.
    up_pods: int = 4
    up_percent: int = 100
    up_period: float = 15.0


@dataclass(slots=True)
class PodAutoscaler:
    """`least` is at least 1: with a ScaledObject's minReplicaCount of 0 KEDA makes it 1."""

    least: int
    most: int
    behavior: Behavior = field(default_factory=Behavior)
    #: (when, recommendation) of the stabilization window.
    _recommended: list[tuple[float, int]] = field(default_factory=list)
    #: (when, pods added) of the last period.
    _added: list[tuple[float, int]] = field(default_factory=list)

    def replicas(self, now: float, current: int, total: float | None, target: float) -> int:
        """The replicas to set at a look; `total` None: the metric cannot be read, and nothing changes."""
        if current == 0 or total is None:
            return current
        if current > self.most:
            return self.most
        if current < self.least:
            return self.least
        desired = current
        if not 1.0 - TOLERANCE <= total / (target * current) <= 1.0 + TOLERANCE:
            desired = math.ceil(total / target)
        desired = min(self._stabilized(now, current, desired), self._up_limit(now, current))
        desired = max(self.least, min(desired, self.most))
        if desired > current:
            self._added.append((now, desired - current))
        return desired

    def _stabilized(self, now: float, current: int, desired: int) -> int:
        """Not below any recommendation of the window."""
        oldest = now - self.behavior.down_stabilization
        self._recommended = [(when, count) for when, count in self._recommended if when > oldest]
        self._recommended.append((now, desired))
        if desired >= current:
            return desired
        return min(current, max(count for _, count in self._recommended))

    def _up_limit(self, now: float, current: int) -> int:
        behavior = self.behavior
        self._added = [(when, pods) for when, pods in self._added if when > now - behavior.up_period]
        before = current - sum(pods for _, pods in self._added)
        return max(before + behavior.up_pods, math.ceil(before * (1 + behavior.up_percent / 100)))
