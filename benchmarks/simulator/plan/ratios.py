"""Which ratio of encoders to PD workers serves most, and what replicas serve on as many devices."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from triptych.simulator.cluster.shape import ClusterShape, colocated, on_devices
from triptych.simulator.plan.estimate import estimate
from triptych.simulator.plan.trials import Fineness, Trials

#: Windows are short: a shape whose bound is a little below what another serves may still serve more.
BOUND_MARGIN = 1.1
#: Where other loads are looked at, the answer is near.
_NEAR = Fineness(0.06, 1.06)
#: A shape is better than another when it serves more by what a search cannot tell apart.
ALIKE = 1.06


@dataclass(frozen=True, slots=True)
class Served:
    """Sustained requests per second of a shape: one figure per load. None: its bound rules it out."""

    shape: ClusterShape
    bound: float
    rates: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def rate(self) -> float:
        """The median; 0 without any."""
        return statistics.median(self.rates) if self.rates else 0.0

    @property
    def skipped(self) -> bool:
        return not self.rates

    @property
    def of_bound(self) -> float:
        """What waiting leaves of the bound; at most all of it, which short windows may seem to pass."""
        return min(self.rate / self.bound, 1.0) if self.bound else 0.0


@dataclass(frozen=True, slots=True)
class Ratios:
    """`apart`: every ratio, by the number of encoders. `replicas`: as many devices that are both."""

    apart: tuple[Served, ...]
    replicas: Served

    @property
    def best(self) -> Served:
        """The ratio that serves most."""
        return max(self.apart, key=lambda served: served.rate)

    @property
    def verdict(self) -> str:
        """Who serves more, when it is more than a search can tell apart, and than loads differ."""
        best, replicas = self.best, self.replicas
        if not best.rate and not replicas.rate:
            return "nobody serves this load within the SLO"
        if best.rate > ALIKE * replicas.rate and min(best.rates) >= max(replicas.rates):
            return f"{best.name} serves more"
        if replicas.rate > ALIKE * best.rate and min(replicas.rates) >= max(best.rates):
            return f"{replicas.name} serves more"
        return "open: both serve as much as the search can tell"


def candidates(devices: int, *, pictures: bool) -> list[ClusterShape]:
    """Every ratio of so many devices. Without pictures, encoders would have nothing to do."""
    return [on_devices(count, devices - count) for count in (range(1, devices) if pictures else (0,))]


def best_ratio(trials: Trials) -> Ratios:
    """Ratios in the order of their bounds, until none that is left can be better; then the answer's loads.

    One load decides between ratios; the best one and the replicas are measured with all of them.
    """
    question = trials.question
    load, found = question.workload, estimate(question)
    pictures = any(count for count, weight in load.images if weight)
    shapes = candidates(question.devices, pictures=pictures)
    served: dict[str, Served] = {}
    best = 0.0
    for shape in sorted(shapes, key=found.of, reverse=True):
        rates: tuple[float, ...] = ()
        if not served or found.of(shape) * BOUND_MARGIN > best:
            rates = (trials.highest(shape, load),)
            best = max(best, *rates)
        served[shape.name] = Served(shape, found.of(shape), rates)
    together = colocated(question.devices)
    replicas = Served(together, found.of(together), (trials.highest(together, load),))
    winner = max(served.values(), key=lambda one: one.rate)
    served[winner.name] = _repeated(trials, winner)
    return Ratios(tuple(served[shape.name] for shape in shapes), _repeated(trials, replicas))


def _repeated(trials: Trials, served: Served) -> Served:
    load, first = trials.question.workload, served.rates[0]
    if not first:
        return served
    more = [
        trials.highest(served.shape, load, first, repeat, _NEAR)
        for repeat in range(1, trials.question.repeats)
    ]
    return Served(served.shape, served.bound, (first, *more))
