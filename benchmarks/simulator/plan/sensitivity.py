"""How the answer moves with the share of requests that have pictures, and with pictures shown again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from triptych.goodput.load.workload import Workload
from triptych.simulator.plan.estimate import estimate
from triptych.simulator.plan.ratios import Ratios, Served
from triptych.simulator.plan.trials import COARSE, Trials

SHARES = (0.0, 0.5, 1.0)
REUSES = (0.0, 0.5, 0.9)


@dataclass(frozen=True, slots=True)
class SensitivityPoint:
    """`kind` is "share" or "reuse", at `value`; sustained requests per second of the answer's two shapes.

    `best`: the ratio whose bound is highest there, by costs alone.
    """

    kind: str
    value: float
    apart: float
    replicas: float
    best: str
    given: bool


def with_share(load: Workload, share: float) -> Workload:
    """A share of requests has pictures, in the load's own proportions; one each where it has none."""
    pictures = tuple((count, weight) for count, weight in load.images if count and weight) or ((1, 1.0),)
    total = sum(weight for _, weight in pictures)
    scaled = tuple((count, weight * share / total) for count, weight in pictures if share)
    return replace(load, images=(((0, 1 - share),) if share < 1 else ()) + scaled)


def share_of(load: Workload) -> float:
    """The share of requests with pictures."""
    return sum(weight for count, weight in load.images if count) / sum(weight for _, weight in load.images)


def points(load: Workload) -> Iterator[tuple[str, float, Workload]]:
    """(kind, value, workload); reuse only where there are pictures."""
    for share in sorted({*SHARES, round(share_of(load), 4)}):
        yield "share", share, with_share(load, share)
    for reuse in sorted({*REUSES, load.reuse}) if share_of(load) else ():
        yield "reuse", reuse, replace(load, reuse=reuse)


def sensitivity_searches(load: Workload) -> int:
    """Searches of `sensitivity`, at most: two at each point but the load's own."""
    given = {"share": share_of(load), "reuse": load.reuse}
    return 2 * sum(value != given[kind] for kind, value, _ in points(load))


def sensitivity(trials: Trials, ratios: Ratios) -> tuple[SensitivityPoint, ...]:
    """The answer's ratio and the replicas over all points, one load each, less finely than the answer."""
    found = []
    question = trials.question
    # An answer for texts alone has no encoder, and would fail at the first picture.
    apart = ratios.best if ratios.best.shape.encoders else None
    for kind, value, load in points(question.workload):
        given = value == (share_of(question.workload) if kind == "share" else question.workload.reuse)
        both = [
            (served.rate if given else _rate(trials, served, load)) if served is not None else 0.0
            for served in (apart, ratios.replicas)
        ]
        found.append(SensitivityPoint(kind, value, both[0], both[1], _best(trials, ratios, load), given))
    return tuple(found)


def _rate(trials: Trials, served: Served, load: Workload) -> float:
    start = served.of_bound * estimate(trials.question, load).of(served.shape)
    return trials.highest(served.shape, load, start, 0, COARSE) if start else 0.0


def _best(trials: Trials, ratios: Ratios, load: Workload) -> str:
    found = estimate(trials.question, load)
    return max(ratios.apart, key=lambda served: found.of(served.shape)).name
