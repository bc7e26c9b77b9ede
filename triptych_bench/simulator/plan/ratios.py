"""Which ratio of encoders to PD workers serves most, what replicas serve instead, and the advice."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from triptych_bench.simulator.cluster.shape import ClusterShape, colocated, in_step
from triptych_bench.simulator.plan.estimate import Estimate, estimate
from triptych_bench.simulator.plan.question import Question
from triptych_bench.simulator.plan.trials import Fineness, Trials

#: Windows are short: a shape whose bound is a little below what another serves may still serve more.
BOUND_MARGIN = 1.1
#: Divisions between prefill and decode that are tried.
DIVISIONS = 2
#: For further loads, whose answer is near that of the first.
_NEAR = Fineness(0.06, 1.06)
#: A shape is better than another when it serves more by what a search cannot tell apart.
ALIKE = 1.06


@dataclass(frozen=True, slots=True)
class Served:
    """Sustained requests per second of a shape, one figure per load; none where its bound rules it out."""

    shape: ClusterShape
    bound: float
    rates: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def rate(self) -> float:
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
    """Every ratio by the number of encoders (`apart`), and as many devices that are both: with tower and
    decoder in turn (`replicas`), and with the tower inside the step as vLLM has it (`in_step`). `roles`: the
    best ratio with its PD workers divided between prefill and decode.
    """

    apart: tuple[Served, ...]
    replicas: Served
    in_step: Served
    roles: tuple[Served, ...] = ()

    @property
    def baseline(self) -> Served:
        """The replicas that serve more."""
        return max(self.replicas, self.in_step, key=lambda served: served.rate)

    @property
    def all(self) -> tuple[Served, ...]:
        return (*self.apart, *self.roles, self.replicas, self.in_step)

    @property
    def best(self) -> Served:
        """The ratio that serves most."""
        return max(self.apart, key=lambda served: served.rate)

    @staticmethod
    def better(one: Served, other: Served, price: float = 1.0) -> bool:
        """By more than a search can tell apart, and than loads differ; `one` costs `price` times as much."""
        return one.rate > ALIKE * price * other.rate and min(one.rates) >= price * max(other.rates)

    @property
    def verdict(self) -> str:
        best, replicas = self.best, self.baseline
        if not best.rate and not replicas.rate:
            return "nobody serves this load within the SLO"
        for one, other in ((best, replicas), (replicas, best)):
            if self.better(one, other):
                return f"{one.name} serves more"
        return "open: both serve as much as the search can tell"


def max_pd_workers(question: Question) -> int:
    """PD workers, or replicas, that all of the devices or the budget make."""
    if not question.budget:
        return question.devices // question.device.ranks
    return int(question.budget / ((question.device.hour or 1.0) * question.device.ranks) + 1e-9)


def candidates(question: Question, *, pictures: bool) -> list[ClusterShape]:
    """Every ratio of the question's devices; with a budget, for every number of PD workers that it buys as
    many encoders as the rest of it does. Without pictures, encoders would have nothing to do.
    """
    maximum, ranks = max_pd_workers(question), question.device.ranks
    if not pictures:
        return [question.apart(0, maximum)]
    counts = [(question.devices - ranks * n, n) for n in range(maximum, 0, -1)]
    if budget := question.budget:
        price, encoder_price = question.device.hour, question.encoders_on.hour
        assert price and encoder_price, "check_question sees to prices"
        counts = [
            (int((budget - n * price * ranks) / encoder_price + 1e-9), n) for n in range(1, maximum + 1)
        ]
    return [question.apart(encoders, pd_workers) for encoders, pd_workers in counts if encoders]


def best_ratio(trials: Trials, later: int = 0) -> Ratios:
    """Ratios in the order of their bounds, until none that is left can be better; then the answer's loads.

    One load decides between ratios; the best one and the replicas are measured with all of them. `later`
    searches follow, which the progress counts.
    """
    question = trials.question
    load, bounds, count = question.workload, estimate(question), max_pd_workers(question)
    shapes = candidates(question, pictures=any(count for count, weight in load.images if weight))
    served: dict[str, Served] = {}
    best, others = 0.0, 3 * (question.repeats - 1) + 2 + later
    for tried, shape in enumerate(sorted(shapes, key=bounds.of, reverse=True)):
        trials.expect(len(shapes) - tried + others)
        rates: tuple[float, ...] = ()
        if not served or bounds.of(shape) * BOUND_MARGIN > best:
            rates = (trials.highest(shape, load),)
            best = max(best, *rates)
        served[shape.name] = Served(shape, bounds.of(shape), rates)
    trials.expect(others)
    winner = max(served.values(), key=lambda one: one.rate)
    winner = served[winner.name] = _repeated(trials, winner)
    roles = _roles(trials, bounds, winner)
    ours, vllm = (
        _repeated(trials, Served(shape, bounds.of(shape), (trials.highest(shape, load),)))
        for shape in (colocated(count), in_step(count))
    )
    return Ratios(tuple(served[shape.name] for shape in shapes), ours, vllm, roles)


def _roles(trials: Trials, bounds: Estimate, best: Served) -> tuple[Served, ...]:
    """The best ratio with its PD workers divided, by the number for prefill; the likeliest are tried."""
    counts, question = best.shape, trials.question
    shapes = [
        question.apart(counts.encoders, counts.pd_workers, prefill=prefill)
        for prefill in range(1, counts.pd_workers)
    ]
    served = {shape.name: Served(shape, bounds.of(shape)) for shape in shapes}
    likeliest = sorted(shapes, key=bounds.of, reverse=True)[:DIVISIONS]
    for shape in likeliest if best.rate else ():
        # One load decides, as between ratios.
        served[shape.name] = Served(shape, bounds.of(shape), (trials.highest(shape, question.workload),))
    winner = max(served.values(), key=lambda one: one.rate, default=None)
    if winner is not None and winner.rates:
        served[winner.name] = _repeated(trials, winner)
    return tuple(served.values())


def _repeated(trials: Trials, served: Served) -> Served:
    load, first, repeats = trials.question.workload, served.rates[0], range(1, trials.question.repeats)
    more = [trials.highest(served.shape, load, first, repeat, _NEAR) for repeat in repeats] if first else []
    return Served(served.shape, served.bound, (first, *more))


@dataclass(frozen=True, slots=True)
class Advice:
    """Whether to disaggregate, None where a search cannot tell, and why. `gain`: the best ratio's rate over
    that of the better replicas, per dollar where they cost unequally; None where one serves nothing.
    """

    disaggregate: bool | None
    gain: float | None
    reason: str


def advise(ratios: Ratios, bounds: Estimate, price: float = 1.0) -> Advice:
    """From what was served, and the stages' bounds. `price`: what the best ratio costs, in replicas."""
    best, baseline = ratios.best, ratios.baseline
    if not best.shape.encoders:
        reason = "Don't disaggregate: no request has a picture, encoders would have nothing to do."
        return Advice(False, None, reason)
    if not best.rate and not baseline.rate:
        return Advice(None, None, "Nothing serves this load within the SLO.")
    if not best.rate:
        return Advice(False, None, f"Don't disaggregate: only {baseline.name} serves this load.")
    if not baseline.rate:
        return Advice(True, None, f"Disaggregate: only {best.name} serves this load.")
    gain = best.rate / baseline.rate / price
    each = "" if price == 1 else " per dollar"
    limit, idle = _stages(best, bounds)
    serves = f"{best.name} serves {gain:.2f}x of {baseline.name}{each}"
    if ratios.better(best, baseline, price):
        return Advice(True, gain, f"Disaggregate: {serves}. {limit}.")
    if ratios.better(baseline, best, 1 / price):
        serves = f"{baseline.name} serves {1 / gain:.2f}x of {best.name}{each}"
        return Advice(False, gain, f"Don't disaggregate: {serves}. {limit}; {idle}.")
    serves = f"{serves}, and a search cannot tell less than {ALIKE - 1:.0%}"
    return Advice(None, gain, f"Don't disaggregate for throughput: {serves}. {limit}; {idle}.")


def advise_roles(ratios: Ratios) -> Advice:
    """Whether to divide the best ratio's PD workers between prefill and decode."""
    best = ratios.best
    divided = max(ratios.roles, key=lambda served: served.rate, default=None)
    if divided is None or not best.rate:
        return Advice(None, None, "Prefill and decode apart takes two PD workers: not tried.")
    gain = divided.rate / best.rate
    serves = f"Prefill and decode apart: {divided.name} serves {gain:.2f}x of {best.name}"
    if ratios.better(divided, best):
        return Advice(True, gain, f"{serves}: give PD workers roles.")
    if not divided.rate or ratios.better(best, divided):
        return Advice(False, gain, f"{serves}: it does not pay, leave --role at both.")
    return Advice(None, gain, f"{serves}, which a search cannot tell: leave --role at both.")


def _stages(best: Served, bounds: Estimate) -> tuple[str, str]:
    """Sentences: which pool limits the ratio, and how idle the other one is."""
    shape = best.shape
    shares = {
        "encoders": best.rate / (shape.encoders * bounds.encoder),
        "PD workers": best.rate / (shape.pd_workers * bounds.pd_worker),
    }
    full, idle = sorted(shares, key=lambda name: shares[name], reverse=True)
    minimum = f"its {idle} are at {min(shares[idle], 1.0):.0%} of what they could serve"
    return f"The {full} are its limit", f"{minimum}, while replicas use every device for both"
