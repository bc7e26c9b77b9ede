"""Runs a whole cluster on one machine: store, workers, proxy; in this order up, in reverse down."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from triptych.apps.launch.children import Child
from triptych.apps.launch.cluster_state import (
    answers_ready,
    connected,
    keep_targets,
    registered,
    remove_state,
    write_state,
)
from triptych.apps.launch.fork.client import ForkServer
from triptych.apps.launch.plan.cluster import ClusterPlan
from triptych.apps.launch.scaling import GRACE_SECONDS, LocalWorkers, follow_decisions
from triptych.registry.registry import Registry

logger = logging.getLogger("launch")

#: A store that is gone is started again, empty; everything in it is recomputed on demand.
STORE_CHECK_SECONDS = 0.5


class Supervisor:
    """Owns the processes of one `triptych serve`."""

    def __init__(self, plan: ClusterPlan, on_ready: Callable[[], None]) -> None:
        self._plan = plan
        self._on_ready = on_ready
        self._fork_server = ForkServer(plan.fork_server) if plan.fork_server else None
        self._workers = LocalWorkers(plan, self._fork_server, self._changed)
        self._proxy = Child("proxy", plan.proxy, plan.proxy_secrets, on_change=self._changed)
        self._stop = asyncio.Event()
        self._is_current = True

    async def run(self) -> int:
        """Until SIGINT or SIGTERM; the exit code. Leaves no process and no socket behind."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop.set)
        if self._plan.store is not None:
            self._plan.store.start()
        if self._fork_server is not None:
            await self._fork_server.start()
        self._workers.start_first()
        watches = [asyncio.create_task(self._proxy.watch()), asyncio.create_task(self._workers.wait())]
        helpers = [asyncio.create_task(helper) for helper in self._helpers()]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([stopped, *watches], return_when=asyncio.FIRST_COMPLETED)
            return next((code for watch in watches if watch.done() and (code := watch.result())), 0)
        finally:
            # First: nothing starts any more.
            for task in (*helpers, stopped):
                task.cancel()
            await asyncio.gather(*helpers, stopped, return_exceptions=True)
            await self._end()
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            if cause := self._proxy.cause or self._workers.cause:
                logger.error("%s", cause)

    def _helpers(self) -> list[Coroutine[Any, Any, None]]:
        """What is done beside the watches, until the end."""
        plan = self._plan
        scaling = [follow_decisions(plan.store_url, plan.scaled, self._workers)] if plan.scaled else []
        return [self._watch_store(), self._announce(), self._keep_targets(), *scaling]

    async def _end(self) -> None:
        logger.info("stopping")
        await self._proxy.end(GRACE_SECONDS)
        await self._workers.end()
        if self._fork_server is not None:
            await self._fork_server.end()
            # One that was being forked meanwhile.
            await self._workers.end()
        await self._workers.close()
        if self._plan.store is not None:
            self._plan.store.stop()
        remove_state(self._plan.run_dir)
        logger.info("stopped")

    async def _announce(self) -> None:
        """Announces once that the cluster answers, not again when the store or the fork server restarts."""
        await self._wait_until_ready()
        self._on_ready()
        while True:
            self._changed()
            await asyncio.sleep(0.5)

    async def _keep_targets(self) -> None:
        """Keeps the file of addresses that Prometheus asks."""
        store = await connected(self._plan.store_url)
        try:
            await keep_targets(Registry(store), self._plan.run_dir, self._plan.proxy_metrics)
        finally:
            await store.close()

    async def _wait_until_ready(self) -> None:
        waited: dict[str, int] = {}
        while True:
            self._changed()
            counts = await registered(self._plan.store_url)
            if counts != waited:
                logger.info(
                    "%s", ", ".join(f"{counts.get(p, 0)} of {n} {p}" for p, n in self._plan.pools.items())
                )
                waited = counts
            complete = all(counts.get(pool, 0) >= count for pool, count in self._plan.pools.items())
            if complete and await answers_ready(*self._plan.proxy_address, tls=self._plan.proxy_tls):
                return
            await asyncio.sleep(0.2)

    def _changed(self) -> None:
        """Brings cluster.json up to date, also when a child has started or ended; nothing waits for it."""
        try:
            self._write_processes()
        except OSError as error:
            if self._is_current:
                logger.warning("cluster.json is out of date: %s", error)
            self._is_current = False
        else:
            self._is_current = True

    def _write_processes(self) -> None:
        processes: dict[str, int | None] = {**self._workers.processes, "proxy": self._proxy.pid}
        if self._fork_server is not None:
            processes["fork-server"] = self._fork_server.pid
        if self._plan.store is not None:
            processes["store"] = self._plan.store.pid if self._plan.store.running else None
        write_state(self._plan.run_dir, self._plan.store_url, {"processes": processes})

    async def _watch_store(self) -> None:
        store = self._plan.store
        while store is not None:
            await asyncio.sleep(STORE_CHECK_SECONDS)
            await store.keep_running()
