"""Keeps a cluster's actors on Ray as they are meant to be: starts, adopts, scales and removes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar, TypeVarTuple

from triptych.apps.launch.ray.actor import GRACE_SECONDS, ActorState
from triptych.apps.launch.ray.connection import ActorGone, ActorGroup, RayActors, free_resources, frozen
from triptych.apps.launch.ray.pools import ActorPool, index_of, pool_of
from triptych.apps.launch.scaling import PoolWorkers
from triptych.base.errors import ConfigError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

logger = logging.getLogger("launch")

#: Seconds that a call to Ray's head gets: one that is away must not hold a stop up.
_CALL_SECONDS = 20.0
#: A drain ends within the service's grace; Ray needs a moment around it.
_DRAIN_SECONDS = GRACE_SECONDS + 15.0
#: Between two starts of an actor that cannot work on the node that it came to.
_FAILED_SECONDS = 10.0
#: Seconds that the `triptych serve` before this one gets to end.
_CLAIM_SECONDS = 15.0


class DesiredActors:
    """The names of the actors that should run: a `PoolHost` of the controller that scales pools.

    `draining` says which ones have begun to drain and not ended.
    """

    def __init__(
        self, pools: Mapping[str, ActorPool], draining: Callable[[], Collection[str]] = lambda: ()
    ) -> None:
        self._pools = pools
        self._draining = draining
        self._running = {name: pool.names(pool.size.minimum) for name, pool in pools.items()}

    @property
    def names(self) -> list[str]:
        """All of them, those that a pool always has first."""
        return [name for running in self._running.values() for name in running]

    def keep(self, adopted: Collection[str]) -> None:
        """Adds the actors of an earlier `triptych serve` that are within the limits of their pools."""
        for name in sorted(adopted, key=index_of):
            pool = self._pools[pool_of(name)]
            running = self._running[pool.name]
            if name not in running and name in pool.names(pool.size.maximum):
                running.append(name)

    def workers(self, pool: str) -> PoolWorkers:
        of = next(each for each in self._pools.values() if each.target == pool)
        # The first are those that the pool always has: they are never the newest.
        return PoolWorkers(of.names(of.size.maximum), list(self._running[of.name]), self._draining())

    def start(self, name: str) -> None:
        """Adds an actor."""
        self._running[pool_of(name)].append(name)

    def drain(self, name: str) -> None:
        """Removes an actor."""
        self._running[pool_of(name)].remove(name)


@dataclass(frozen=True, slots=True)
class ActorChanges:
    """Placement groups to ask for, by pool and group; actors to start and to drain; groups to give back."""

    groups: tuple[tuple[str, str], ...] = ()
    start: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


def find_changes(
    pools: Mapping[str, ActorPool],
    desired: Collection[str],
    names: Collection[str],
    groups: Collection[str],
    draining: Collection[str] = (),
) -> ActorChanges:
    """What leads from the actors `names` and the placement groups `groups` to the actors `desired`.

    An actor that drains has its name until it has ended. A group is given back when it has no actor any more.
    """
    needed = {group_of(pools, name): pool_of(name) for name in desired}
    leaving = [name for name in names if name not in desired and name not in draining]
    held = {group_of(pools, name) for name in (*names, *draining)}
    return ActorChanges(
        groups=tuple((pool, group) for group, pool in needed.items() if group not in groups),
        start=tuple(name for name in desired if name not in names and name not in draining),
        drain=tuple(sorted(leaving, key=lambda name: (pool_of(name), -index_of(name)))),
        remove=tuple(sorted(set(groups) - needed.keys() - held)),
    )


def group_of(pools: Mapping[str, ActorPool], name: str) -> str:
    """The placement group of an actor, also of one whose pool this plan does not have."""
    pool = pools.get(pool_of(name))
    return pool.group(name) if pool is not None else name


class ActorSupervisor:
    """The actors of one cluster. `reconcile` is called again and again, in one event loop."""

    def __init__(self, actors: RayActors, pools: Mapping[str, ActorPool]) -> None:
        self._actors = actors
        self._pools = pools
        self._draining: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}
        self.states: dict[str, ActorState] = {}

    async def claim(self) -> None:
        """Makes this process the only one that has the cluster; ConfigError while another one has it."""
        deadline = time.monotonic() + _CLAIM_SECONDS
        while not await _call(self._actors.claim):
            who = await _call(self._actors.claimed_by)
            if who:
                raise ConfigError(
                    f"this cluster is served already, by {who}: end that one, or name another --cluster-name"
                )
            if time.monotonic() > deadline:
                raise ConfigError("Ray still has the last `triptych serve` of this cluster: try again")
            await asyncio.sleep(0.5)

    async def adopt(self) -> set[str]:
        """Keeps the actors that an earlier `triptych serve` left if they are as this one would start them.

        The others are drained and removed. Returns the names of those that are kept.
        """
        names, groups = await self._existing()
        kept = set()
        for name in sorted(names):
            if await self._is_ours(name, groups):
                kept.add(name)
        if names:
            logger.info("%d actors are adopted, %d replaced", len(kept), len(names) - len(kept))
        await asyncio.gather(*(self._remove(name) for name in names - kept))
        held = {group_of(self._pools, name) for name in kept}
        for group in groups.keys() - held:
            await _call(self._actors.remove_group, group)
        return kept

    async def _is_ours(self, name: str, groups: Mapping[str, ActorGroup]) -> bool:
        pool = self._pools.get(pool_of(name))
        if pool is None or name not in pool.names(pool.size.maximum):
            return False
        group = groups.get(pool.group(name))
        if group is None or group.strategy != pool.resources.strategy:
            return False
        if group.bundles != frozen(pool.bundles(pool.group(name))):
            return False
        try:
            return await _call(self._actors.command, name) == pool.command_of(name)
        except ActorGone:
            return False

    @property
    def draining(self) -> Collection[str]:
        """The actors that have begun to drain and have not ended."""
        return self._draining.keys()

    async def reconcile(self, desired: Collection[str]) -> None:
        """One step towards the actors `desired`. Never waits for a drain."""
        names, groups = await self._existing()
        now = time.monotonic()
        changes = find_changes(self._pools, desired, names, groups, self._draining)
        await self._apply(changes, now)
        self.states = await _call(self._actors.states, names)

    async def _apply(self, changes: ActorChanges, now: float) -> None:
        for pool, group in changes.groups:
            await _call(self._actors.create_group, self._pools[pool], group)
        for name in changes.start:
            if self._not_before.get(name, 0.0) <= now:
                logger.info("starting %s", name)
                # Its name may be taken for another moment: the next step tries again.
                with contextlib.suppress(ValueError):
                    await _call(self._actors.start, self._pools[pool_of(name)], name)
        for name in changes.drain:
            logger.info("draining %s", name)
            self._draining[name] = asyncio.create_task(self._drain(name), name=f"drain {name}")
        for group in changes.remove:
            await _call(self._actors.remove_group, group)

    async def restart_failed(self, name: str) -> None:
        """Removes an actor that cannot work where it is; `reconcile` starts another one after a while."""
        self._not_before[name] = time.monotonic() + _FAILED_SECONDS
        await _call(self._actors.kill, name)

    async def stop(self) -> None:
        """Drains and removes everything of the cluster: proxies first, then the workers together."""
        for task in self._draining.values():
            task.cancel()
        await asyncio.gather(*self._draining.values(), return_exceptions=True)
        names, groups = await self._existing()
        proxies = {name for name in names if pool_of(name) == "proxy"}
        await asyncio.gather(*(self._remove(name) for name in proxies))
        await asyncio.gather(*(self._remove(name) for name in names - proxies))
        for group in groups:
            await _call(self._actors.remove_group, group)

    async def _drain(self, name: str) -> None:
        try:
            await self._remove(name)
        finally:
            del self._draining[name]

    async def _remove(self, name: str) -> None:
        try:
            await _call(self._actors.drain, name, _DRAIN_SECONDS, seconds=_DRAIN_SECONDS + _CALL_SECONDS)
        except (ActorGone, TimeoutError) as error:
            logger.info("%s is not drained: %s", name, error)
        await _call(self._actors.kill, name)

    async def _existing(self) -> tuple[set[str], dict[str, ActorGroup]]:
        return await _call(self._actors.names), await _call(self._actors.groups)

    async def waiting(self) -> str:
        """What Ray has no resources for yet, for people; "" when everything has its place."""
        groups = await _call(self._actors.groups)
        pending = sorted(group for group, one in groups.items() if not one.placed)
        if not pending:
            return ""
        wants = "; ".join(f"{group}: {_described(groups[group])}" for group in pending)
        return f"{wants}. Free in Ray: {await _call(free_resources)}"


def _described(group: ActorGroup) -> str:
    bundles = [" and ".join(f"{name} {number:g}" for name, number in one) for one in group.bundles]
    return f"{len(bundles)} x ({bundles[0]}), {group.strategy}"


async def _call(function: Callable[[*Ts], T], *args: *Ts, seconds: float = _CALL_SECONDS) -> T:
    """The result of a blocking call to Ray, in a thread; TimeoutError after `seconds`."""
    return await asyncio.wait_for(asyncio.to_thread(function, *args), seconds)
