"""The worker processes of one machine: which of them run, which are drained."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from triptych.apps.launch.children import Child
from triptych.apps.launch.fork.client import ForkServer
from triptych.apps.launch.plan.cluster import ClusterPlan
from triptych.apps.launch.scaling.change import PoolWorkers

logger = logging.getLogger("launch")

#: Seconds that a service gets to finish what it holds when all end.
GRACE_SECONDS = 35.0
#: The same for one that is drained while others go on: nobody waits for it.
DRAIN_SECONDS = 120.0


def pool_of(name: str) -> str:
    """The kind of worker that has this name: "encoder" of "encoder-0"."""
    return name.rpartition("-")[0]


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

    @property
    def processes(self) -> dict[str, int | None]:
        """The process ids of all that run or drain, by name; None between two starts."""
        both = {**self._running, **self._draining}
        return {name: both[name].pid for name in self._commands if name in both}

    def workers(self, pool: str) -> PoolWorkers:
        """The workers of a pool."""
        return PoolWorkers(
            names=[name for name in self._commands if pool_of(name) == pool and name not in self._refused],
            running=[name for name in self._running if pool_of(name) == pool],
            draining=[name for name in self._draining if pool_of(name) == pool],
        )

    @property
    def first(self) -> list[str]:
        """The fewest workers that the pools may have: of a pool that is not scaled all."""
        found: list[str] = []
        for pool in dict.fromkeys(pool_of(name) for name in self._commands):
            names = self.workers(pool).names
            sizes = self._plan.scaled.get(pool)
            found += names[: sizes.least] if sizes else names
        return found

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
        others = [name for name in self.workers(pool_of(child.name)).running if name != child.name]
        for named in (self._running, self._draining):
            if named.get(child.name) is child:
                del named[child.name]
        self._on_change()
        if code and (pool_of(child.name) not in self._plan.scaled or not others):
            self._exit_code = code
            self._over.set()
        elif code:
            self._refused.add(child.name)
            logger.error(
                "%s cannot work as configured and is left out: the pool has fewer workers", child.name
            )
