"""Which workers of a pool start, and which are drained, so that it has as many as are wanted. No I/O."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


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


def plan_change(pool: PoolWorkers, wanted: int) -> PoolChange:
    """The change that leaves `wanted` workers running, as far as there are names.

    The newest are drained first. A name whose worker still drains is free once that has ended.
    """
    missing = wanted - len(pool.running)
    if missing >= 0:
        free = [name for name in pool.names if name not in pool.running and name not in pool.draining]
        return PoolChange(start=tuple(free[:missing]))
    return PoolChange(drain=tuple(reversed(pool.running[max(wanted, 0) :])))
