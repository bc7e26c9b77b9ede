"""What a scaler sees of a pool of encoders and what it decides: the interface of all policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


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
