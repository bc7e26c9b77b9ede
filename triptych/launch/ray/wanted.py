"""The wanted actors, as scaling changes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from triptych.launch.ray.plan import ActorPool, index_of, pool_of
from triptych.launch.scaling.change import PoolWorkers


class WantedActors:
    """The names of the actors that are meant to live: a `PoolHost` of the controller that scales pools.

    `draining` says which ones have begun to drain and not ended.
    """

    def __init__(
        self, pools: Mapping[str, ActorPool], draining: Callable[[], Collection[str]] = lambda: ()
    ) -> None:
        self._pools = pools
        self._draining = draining
        self._running = {name: pool.names(pool.size.least) for name, pool in pools.items()}

    @property
    def names(self) -> list[str]:
        """All of them, those that a pool always has first."""
        return [name for running in self._running.values() for name in running]

    def keep(self, adopted: Collection[str]) -> None:
        """Those of an earlier `triptych serve` are meant to live, too, as far as the pools may have them."""
        for name in sorted(adopted, key=index_of):
            pool = self._pools[pool_of(name)]
            running = self._running[pool.name]
            if name not in running and name in pool.names(pool.size.most):
                running.append(name)

    def workers(self, pool: str) -> PoolWorkers:
        names = self._pools[pool].names(self._pools[pool].size.most)
        # The first are those that the pool always has: they are never the newest.
        return PoolWorkers(names, list(self._running[pool]), self._draining())

    def start(self, name: str) -> None:
        """From now on it is meant to live."""
        self._running[pool_of(name)].append(name)

    def drain(self, name: str) -> None:
        """It is not meant to live any more."""
        self._running[pool_of(name)].remove(name)
