"""The scaling of pools on one machine: decisions read from the store, and workers started and drained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from triptych.apps.launch.children import Child
from triptych.apps.launch.cluster_state import connected
from triptych.apps.launch.fork.client import ForkServer
from triptych.apps.launch.plan.cluster import ClusterPlan
from triptych.base.config import WorkerRange
from triptych.base.errors import TriptychError
from triptych.base.scaling import ScalingDecision
from triptych.registry.scaling import ScalingBoard


@dataclass(frozen=True, slots=True)
class PoolWorkers:
    """The workers of a pool by name.

    `names` are all that it may have, first to start first. `running` are those that are meant to run, oldest
    first: also one that starts or is started again. `draining` ones finish what they hold and then end.
    """

    names: Sequence[str]
    running: Sequence[str] = ()
    draining: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class PoolChange:
    """The workers to start or to drain: never both."""

    start: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()


def plan_change(pool: PoolWorkers, desired: int) -> PoolChange:
    """The change that leaves `desired` workers running, as far as there are names.

    The newest are drained first. A name whose worker still drains is free once that has ended.
    """
    missing = desired - len(pool.running)
    if missing >= 0:
        free = [name for name in pool.names if name not in pool.running and name not in pool.draining]
        return PoolChange(start=tuple(free[:missing]))
    return PoolChange(drain=tuple(reversed(pool.running[max(desired, 0) :])))


logger = logging.getLogger("launch")

#: Seconds between two polls of the decisions: a start from zero waits for it.
FOLLOW_SECONDS = 0.1
#: How long one poll waits for the store's answer.
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
                    logger.exception("the %s pool could not be changed; the next poll follows", pool)
            await asyncio.sleep(FOLLOW_SECONDS)

    async def follow(self, pool: str) -> None:
        """One poll of a pool's decision, and the change that it asks for."""
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


async def follow_decisions(store_url: str, pools: Mapping[str, WorkerRange], host: PoolHost) -> None:
    """Follows the proxies' decisions on the scaled pools, once the store answers."""
    store = await connected(store_url)
    try:
        await PoolController(ScalingBoard(store), pools, host).run()
    finally:
        await store.close()


#: Seconds that a service gets to finish what it holds when all end.
GRACE_SECONDS = 35.0
#: The same for one that is drained while others go on: nobody waits for it.
DRAIN_SECONDS = 120.0


class LocalWorkers:
    """The workers of a cluster plan as processes of this machine.

    Of a scaled pool those run that are started and not drained. A worker that dies is started again while it
    is meant to run. `on_change` is called when a process has begun or ended.
    """

    def __init__(
        self, plan: ClusterPlan, fork_server: ForkServer | None, on_change: Callable[[], None]
    ) -> None:
        self._plan = plan
        self._commands = dict(plan.workers)
        self._fork_server = fork_server
        self._on_change = on_change
        #: Oldest first.
        self._running: dict[str, Child] = {}
        self._draining: dict[str, Child] = {}
        #: Those that cannot work as configured.
        self._refused: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._exit_code = 0
        #: Why the cluster cannot go on.
        self.cause = ""

    @property
    def processes(self) -> dict[str, int | None]:
        """The process ids of all that run or drain, by name; None between two starts."""
        both = {**self._running, **self._draining}
        return {name: both[name].pid for name in self._commands if name in both}

    def workers(self, pool: str) -> PoolWorkers:
        """The workers of a pool, or of a role in it that is scaled apart."""
        of = self._plan.target
        return PoolWorkers(
            names=[name for name in self._commands if of(name) == pool and name not in self._refused],
            running=[name for name in self._running if of(name) == pool],
            draining=[name for name in self._draining if of(name) == pool],
        )

    @property
    def first(self) -> list[str]:
        """The fewest workers that the pools may have: of a pool that is not scaled all."""
        first: list[str] = []
        for pool in dict.fromkeys(map(self._plan.target, self._commands)):
            names = self.workers(pool).names
            sizes = self._plan.scaled.get(pool)
            first += names[: sizes.minimum] if sizes else names
        return first

    def start_first(self) -> None:
        """Starts the `first` workers."""
        for name in self.first:
            self.start(name)

    def start(self, name: str) -> None:
        """Begins to keep a process of this name running; it neither runs nor drains yet."""
        child = Child(
            name, self._commands[name], self._plan.worker_secrets, self._fork_server, self._on_change
        )
        self._running[name] = child
        self._spawn(self._watch(child))

    def drain(self, name: str) -> None:
        """Begins to end a running worker: it finishes what it holds."""
        child = self._draining[name] = self._running.pop(name)
        self._spawn(child.end(DRAIN_SECONDS))

    async def wait(self) -> int:
        """Waits until the cluster cannot go on, since a worker cannot work as configured; the exit code."""
        await self._over.wait()
        return self._exit_code

    async def end(self) -> None:
        """Ends all processes that there are; what is being forked meanwhile needs a second call."""
        children = [*self._running.values(), *self._draining.values()]
        await asyncio.gather(*(child.end(GRACE_SECONDS) for child in children))

    async def close(self) -> None:
        """Ends the watch over processes that have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, child: Child) -> None:
        try:
            code = await child.watch()
        except Exception:
            logger.exception("%s could not be started", child.name)
            code = 1
        target = self._plan.target(child.name)
        others = [name for name in self.workers(target).running if name != child.name]
        for named in (self._running, self._draining):
            if named.get(child.name) is child:
                del named[child.name]
        self._on_change()
        if code and (target not in self._plan.scaled or not others):
            self._exit_code, self.cause = code, child.cause
            self._over.set()
        elif code:
            self._refused.add(child.name)
            logger.error(
                "%s cannot work as configured and is left out: the pool has fewer workers", child.name
            )
