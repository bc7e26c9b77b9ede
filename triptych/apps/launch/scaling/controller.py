"""The controller of scaled pools: reads the proxies' decisions in the store and changes what runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from triptych.apps.launch.scaling.change import PoolWorkers, plan_change
from triptych.base.config import WorkerRange
from triptych.base.errors import TriptychError
from triptych.base.scaling import ScalingDecision

logger = logging.getLogger("launch")

#: Seconds between two looks at the decisions: a start from zero waits for it.
FOLLOW_SECONDS = 0.1
#: How long one look waits for the store's answer.
STORE_SECONDS = 5.0


class DecisionReader(Protocol):
    """The scaling board's part that a controller reads."""

    async def decision(self, pool: str) -> ScalingDecision | None: ...


class PoolHost(Protocol):
    """The place where workers run: the processes of one machine, or the actors of a Ray cluster.

    `start` and `drain` begin and return at once; `workers` shows what they have begun.
    """

    def workers(self, pool: str) -> PoolWorkers: ...

    def start(self, name: str) -> None: ...

    def drain(self, name: str) -> None: ...


class PoolController:
    """Follows the decisions on the scaled `pools`, within their ranges, until cancelled.

    While no decision is in force, or the store does not answer, a pool keeps the workers that it has.
    """

    def __init__(self, decisions: DecisionReader, pools: Mapping[str, WorkerRange], host: PoolHost) -> None:
        self._decisions = decisions
        self._pools = pools
        self._host = host
        self._reachable = True

    async def run(self) -> None:
        while True:
            for pool in self._pools:
                try:
                    await self.follow(pool)
                except Exception:
                    logger.exception("the %s pool could not be changed; the next look follows", pool)
            await asyncio.sleep(FOLLOW_SECONDS)

    async def follow(self, pool: str) -> None:
        """One look at a pool's decision, and the change that it asks for."""
        decision = await self._read(pool)
        if decision is None:
            return
        workers = self._host.workers(pool)
        change = plan_change(workers, self._pools[pool].clamp(decision.workers))
        if change.start or change.drain:
            begun = [f"start {name}" for name in change.start] + [f"drain {name}" for name in change.drain]
            running = len(workers.running)
            logger.info("%s pool of %d (%s): %s", pool, running, decision.reason, ", ".join(begun))
        for name in change.start:
            self._host.start(name)
        for name in change.drain:
            self._host.drain(name)

    async def _read(self, pool: str) -> ScalingDecision | None:
        try:
            async with asyncio.timeout(STORE_SECONDS):
                decision = await self._decisions.decision(pool)
        except (TriptychError, TimeoutError) as error:
            if self._reachable:
                logger.warning("no scaling decision can be read, pools stay as they are: %s", error)
            self._reachable = False
            return None
        self._reachable = True
        return decision
