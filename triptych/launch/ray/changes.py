"""The difference between the running and the wanted actors, as a pure function."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from triptych.launch.ray.plan import ActorPool, index_of, pool_of


@dataclass(frozen=True, slots=True)
class ActorChanges:
    """Placement groups to ask for, by pool and group; actors to start and to drain; groups to give back."""

    groups: tuple[tuple[str, str], ...] = ()
    start: tuple[str, ...] = ()
    drain: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


def find_changes(
    pools: Mapping[str, ActorPool],
    wanted: Collection[str],
    names: Collection[str],
    groups: Collection[str],
    draining: Collection[str] = (),
) -> ActorChanges:
    """What leads from the actors `names` and the placement groups `groups` to the actors `wanted`.

    An actor that drains has its name until it has ended. A group is given back when it has no actor any more.
    """
    needed = {group_of(pools, name): pool_of(name) for name in wanted}
    leaving = [name for name in names if name not in wanted and name not in draining]
    held = {group_of(pools, name) for name in (*names, *draining)}
    return ActorChanges(
        groups=tuple((pool, group) for group, pool in needed.items() if group not in groups),
        start=tuple(name for name in wanted if name not in names and name not in draining),
        drain=tuple(sorted(leaving, key=lambda name: (pool_of(name), -index_of(name)))),
        remove=tuple(sorted(set(groups) - needed.keys() - held)),
    )


def group_of(pools: Mapping[str, ActorPool], name: str) -> str:
    """The placement group of an actor, also of one whose pool this plan does not have."""
    pool = pools.get(pool_of(name))
    return pool.group(name) if pool is not None else name
