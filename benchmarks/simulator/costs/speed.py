"""How fast a machine is now, next to the time of its profile: shared machines change by the minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import TypeVar

from triptych.simulator.costs.costs import CostModel

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Speed:
    """What decode steps and towers, each alone, take now as a share of what the profile has: 1.2 is a fifth
    longer. They differ, since what a neighbour takes from caches hurts steps and leaves products alone.
    """

    steps: float = 1.0
    towers: float = 1.0


def mean_speed(found: Sequence[Speed]) -> Speed:
    """Of what was measured before a window and after it."""
    return Speed(fmean(one.steps for one in found), fmean(one.towers for one in found))


def at_speed(costs: CostModel, speed: Speed) -> CostModel:
    """The costs of the same machine at that speed: encoder stages follow towers, all else follows steps."""
    return replace(
        costs,
        encoder=_longer(costs.encoder, speed.towers),
        pd=_longer(costs.pd, speed.steps),
        proxy=_longer(costs.proxy, speed.steps),
        client=_longer(costs.client, speed.steps),
        rpc=costs.rpc * speed.steps,
        # What niceness weighs is no time.
        cores=replace(costs.cores, wake=costs.cores.wake * speed.steps),
    )


def _longer(part: Part, factor: float) -> Part:
    """All costs of a stage, which are seconds, times `factor`."""
    costs = {field.name: factor * getattr(part, field.name) for field in fields(part)}  # type: ignore[arg-type]
    return replace(part, **costs)  # type: ignore[type-var]
