"""Keeps a cluster's actors on Ray as they are wanted: starts, adopts, scales and removes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar, TypeVarTuple

from triptych.errors import ConfigError
from triptych.launch.ray.actor import GRACE_SECONDS, ActorState
from triptych.launch.ray.actors import ActorGone, ActorGroup, RayActors, frozen, room
from triptych.launch.ray.changes import ActorChanges, find_changes, group_of
from triptych.launch.ray.plan import ActorPool, pool_of

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
        if pool is None or name not in pool.names(pool.size.most):
            return False
        group = groups.get(pool.group(name))
        if group is None or group.strategy != pool.resources.strategy:
            return False
        if group.bundles != frozen(pool.bundles(pool.group(name))):
            return False
        try:
            return await _call(self._actors.words, name) == pool.words(name)
        except ActorGone:
            return False

    @property
    def draining(self) -> Collection[str]:
        """The actors that have begun to drain and have not ended."""
        return self._draining.keys()

    async def reconcile(self, wanted: Collection[str]) -> None:
        """One step towards the actors `wanted`. Never waits for a drain."""
        names, groups = await self._existing()
        now = time.monotonic()
        changes = find_changes(self._pools, wanted, names, groups, self._draining)
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
        """What Ray has no room for yet, for people; "" when everything has its place."""
        groups = await _call(self._actors.groups)
        pending = sorted(group for group, one in groups.items() if not one.placed)
        if not pending:
            return ""
        wants = "; ".join(f"{group}: {_shown(groups[group])}" for group in pending)
        return f"{wants}. Free in Ray: {await _call(room)}"


def _shown(group: ActorGroup) -> str:
    bundles = [" and ".join(f"{name} {number:g}" for name, number in one) for one in group.bundles]
    return f"{len(bundles)} x ({bundles[0]}), {group.strategy}"


async def _call(function: Callable[[*Ts], T], *args: *Ts, seconds: float = _CALL_SECONDS) -> T:
    """The result of a blocking call to Ray, in a thread; TimeoutError after `seconds`."""
    return await asyncio.wait_for(asyncio.to_thread(function, *args), seconds)
