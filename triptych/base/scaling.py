"""Values of autoscaling: what a pool has to do, its workers and rules, and how many it should have."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """What a pool is scaled by. ValueError, naming the field and its limit, for what makes no sense.

    `slo` is the seconds that an item may take in the pool, its wait included, and `utilization` the share of
    a worker's time that arriving work may fill. Before a worker is drained, the rest must have been enough
    for `window` seconds for demand that is larger by the share `reserve`.
    """

    minimum: int
    maximum: int
    slo: float
    utilization: float = 0.7
    window: float = 60.0
    reserve: float = 0.25

    def __post_init__(self) -> None:
        if self.minimum < 0:
            raise ValueError(f"minimum is {self.minimum}: it must be 0 or more")
        if self.maximum < max(self.minimum, 1):
            raise ValueError(
                f"maximum is {self.maximum} and minimum is {self.minimum}: "
                "maximum must be at least minimum, and at least 1"
            )
        for name, value, low, high in (
            ("slo", self.slo, 0.0, math.inf),
            ("utilization", self.utilization, 0.0, 1.0),
            ("window", self.window, 0.0, math.inf),
        ):
            if not (low < value <= high and math.isfinite(value)):
                raise ValueError(f"{name} is {value}: it must be above {low:g}, finite, and at most {high:g}")
        if not 0.0 <= self.reserve <= 10.0:
            raise ValueError(f"reserve is {self.reserve}: it must be between 0 and 10")


@dataclass(frozen=True, slots=True)
class SharedRules:
    """A pool's rules on the board, which all proxies decide by; None where this version cannot read them.

    A later `generation` replaces an earlier one. They are `supported` while a proxy that was started with
    them is alive and not draining.
    """

    rules: ScalingRules | None
    generation: int
    supported: bool


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """A pool's outstanding and arriving work, of one proxy or of the whole cluster.

    Work is in seconds of one worker of the kind that the pool grows by. What the caches answer is no work;
    an item that is encoded again counts in `backlog` but not as an arrival. `waiting` are the items that no
    worker computes yet and `largest` the work of the largest outstanding one. `fast` and `slow` are the
    arriving work-seconds per second, averaged over some seconds and over about a minute. `kept` is the
    number below which no decrease has held for its window yet; None where the pool may become inactive.
    """

    backlog: float = 0.0
    waiting: int = 0
    largest: float = 0.0
    fast: float = 0.0
    slow: float = 0.0
    kept: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The workers of one kind in a pool. `speed` is relative to the kind that the pool grows by, 1.0."""

    kind: str
    ready: int
    starting: int = 0
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """How many workers a pool should have, of the kind that it grows by, and why.

    `active`: there is work or there was some lately; a pool that is not active may be scaled to zero.
    `reason` is a word for metrics: "flow", "backlog", "panic", "hold", "consolidate", "idle", "min", "max".
    """

    workers: int
    reason: str
    active: bool
