"""Which ratio of encoders to PD workers serves most, and what replicas serve on as many devices."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from triptych.simulator.cluster.shape import ClusterShape, colocated, in_step
from triptych.simulator.plan.estimate import estimate
from triptych.simulator.plan.question import Question
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
    """`apart`: every ratio, by the number of encoders. `replicas`: as many devices that are both, tower and
    decoder in turn; `in_step`: with the tower inside the step, as vLLM's.
    """

    apart: tuple[Served, ...]
    replicas: Served
    in_step: Served | None = None

    @property
    def baseline(self) -> Served:
        """The replicas that serve more."""
        if self.in_step is None or self.in_step.rate <= self.replicas.rate:
            return self.replicas
        return self.in_step

    @property
    def all(self) -> tuple[Served, ...]:
        """As tables have them."""
        return (*self.apart, self.replicas) + ((self.in_step,) if self.in_step is not None else ())

    @staticmethod
    def better(one: Served, other: Served, price: float = 1.0) -> bool:
        """By more than a search can tell apart, and than loads differ; `one` costs `price` times as much."""
        return one.rate > ALIKE * price * other.rate and min(one.rates) >= price * max(other.rates)

    @property
    def best(self) -> Served:
        """The ratio that serves most."""
        return max(self.apart, key=lambda served: served.rate)

    @property
    def verdict(self) -> str:
        """Who serves more, when it is more than a search can tell apart, and than loads differ."""
        best, replicas = self.best, self.baseline
        if not best.rate and not replicas.rate:
            return "nobody serves this load within the SLO"
        for one, other in ((best, replicas), (replicas, best)):
            if self.better(one, other):
                return f"{one.name} serves more"
        return "open: both serve as much as the search can tell"


def candidates(question: Question, *, pictures: bool) -> list[ClusterShape]:
    """Every ratio of the question's devices; with a budget, for every number of PD workers that it buys as
    many encoders as the rest of it does. Without pictures, encoders would have nothing to do.
    """
    ranks = question.device.ranks
    most = question.devices // ranks
    counts = [(question.devices - ranks * n, n) for n in range(most, 0, -1)]
    if budget := question.budget:
        price, encoder_price = question.device.hour, question.encoders_on.hour
        assert price and encoder_price, "check_question sees to prices"
        each = price * ranks
        most = int(budget / each + 1e-9)
        counts = [(int((budget - n * each) / encoder_price + 1e-9), n) for n in range(1, most + 1)]
    if not pictures:
        return [question.apart(0, most)]
    return [question.apart(encoders, pd_workers) for encoders, pd_workers in counts if encoders]


def best_ratio(trials: Trials, later: int = 0) -> Ratios:
    """Ratios in the order of their bounds, until none that is left can be better; then the answer's loads.

    One load decides between ratios; the best one and the replicas are measured with all of them. `later`
    searches follow, which the progress counts.
    """
    question = trials.question
    load, found = question.workload, estimate(question)
    pictures = any(count for count, weight in load.images if weight)
    shapes, count = candidates(question, pictures=pictures), question.devices // question.device.ranks
    if question.budget:
        each = (question.device.hour or 1.0) * question.device.ranks
        count = max(1, int(question.budget / each + 1e-9))
    served: dict[str, Served] = {}
    best = 0.0
    others = 3 * (question.repeats - 1) + 2 + later
    for tried, shape in enumerate(sorted(shapes, key=found.of, reverse=True)):
        trials.expect(len(shapes) - tried + others)
        rates: tuple[float, ...] = ()
        if not served or found.of(shape) * BOUND_MARGIN > best:
            rates = (trials.highest(shape, load),)
            best = max(best, *rates)
        served[shape.name] = Served(shape, found.of(shape), rates)
    trials.expect(others)
    winner = max(served.values(), key=lambda one: one.rate)
    served[winner.name] = _repeated(trials, winner)
    ours, vllm = (
        _repeated(trials, Served(shape, found.of(shape), (trials.highest(shape, load),)))
        for shape in (colocated(count), in_step(count))
    )
    return Ratios(tuple(served[shape.name] for shape in shapes), ours, vllm)


def _repeated(trials: Trials, served: Served) -> Served:
    load, first = trials.question.workload, served.rates[0]
    if not first:
        return served
    more = [
        trials.highest(served.shape, load, first, repeat, _NEAR)
        for repeat in range(1, trials.question.repeats)
    ]
    return Served(served.shape, served.bound, (first, *more))
