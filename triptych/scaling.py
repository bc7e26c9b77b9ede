"""Values of autoscaling: what a pool has to do, the workers that it has, and how many it should have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """A pool's outstanding and arriving work, of one proxy or of the whole cluster.

    Work is in seconds of one worker of the kind that the pool grows by. What the caches answer is no work;
    an item that is encoded again counts in `backlog` but not as an arrival. `waiting` are the items that no
    worker computes yet and `largest` the work of the largest outstanding one. `fast` and `slow` are the
    arriving work-seconds per second, averaged over some seconds and over about a minute.
    """

    backlog: float = 0.0
    waiting: int = 0
    largest: float = 0.0
    fast: float = 0.0
    slow: float = 0.0


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
