"""Knative's Pod Autoscaler on concurrency.

Parameters are the defaults of knative.dev/docs/serving/autoscaling: a stable window of 60 s, a panic window
of 10 % of it, panic from 200 % of what the ready pods may have, a target utilization of 70 %, at most half of
the pods away in one step, a decision every 2 s. The concurrency of one pod has no default that suits an
encoder (100): 8 is the worker's tower credit, what may wait and be at work there; 1 is one item at work.
"""

from __future__ import annotations

import math
from collections import deque

from triptych.simulator.autoscale.scaler import PoolView

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

    def __init__(self, least: int, most: int, concurrency: float = 8.0) -> None:
        self._least = least
        self._most = most
        self._per_pod = concurrency * UTILIZATION
        self._seconds: deque[int] = deque(maxlen=STABLE_SECONDS)
        self._panic_until = -math.inf
        self._panic_pods = 0
        self._next_tick = 0.0
        self._desired = max(least, 1)

    def desired(self, seen: PoolView) -> int:
        self._seconds.append(seen.outstanding)
        woken = seen.outstanding and not self._desired
        if woken or seen.now >= self._next_tick:
            self._next_tick = seen.now + TICK_SECONDS
            self._desired = min(max(self._wanted(seen), self._least), self._most)
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
