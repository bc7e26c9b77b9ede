"""How many devices a rate takes, and what a million requests cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.errors import ConfigError
from triptych.simulator.cluster.shape import ClusterShape, colocated, on_devices
from triptych.simulator.plan.estimate import Estimate, best_counts, estimate
from triptych.simulator.plan.question import Question
from triptych.simulator.plan.ratios import ALIKE, Ratios, Served
from triptych.simulator.plan.trials import Trials

#: Shapes up to so many devices are simulated before they are named; larger ones are named by their bound.
MOST_SIMULATED = 32
MOST_BOUGHT = 4096
#: Devices added to a shape that does not hold the rate, before it is named as it is.
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Purchase:
    """`shape` serves `rate`; `confirmed` in simulation. `dollars` per million requests, if priced."""

    shape: ClusterShape
    devices: int
    rate: float
    confirmed: bool
    dollars: float | None


def cost_per_million(devices: int, hour: float | None, rate: float) -> float | None:
    """Dollars for a million requests at `rate` per second; None without a price or a rate."""
    if hour is None or rate <= 0:
        return None
    return devices * hour / 3600 / rate * 1e6


def fewest_devices(found: Estimate, of_bound: float, rate: float, *, apart: bool) -> int:
    """The fewest whose bound, less what waiting takes of it, is `rate` requests per second.

    ConfigError when that is more than MOST_BOUGHT.
    """
    for devices in range(2 if apart else 1, MOST_BOUGHT + 1):
        bound = found.bound(*best_counts(found, devices)) if apart else devices * found.replica
        if bound * of_bound >= rate:
            return devices
    raise ConfigError(f"--rate {rate:g} takes more than {MOST_BOUGHT} devices: split it")


def shape_of(found: Estimate, devices: int, *, apart: bool) -> ClusterShape:
    """The best ratio of so many devices, or as many replicas."""
    return on_devices(*best_counts(found, devices)) if apart else colocated(devices)


def purchase(trials: Trials, served: Served, rate: float, *, apart: bool) -> Purchase:
    """The fewest devices by the bound, with what the worst of the answer's loads left of it; then simulated.

    ConfigError for a rate that cannot be served.
    """
    if not 0 < rate < math.inf:
        raise ConfigError(f"--rate {rate:g} must be above 0")
    question = trials.question
    found = estimate(question)
    of_bound = min(min(served.rates) / served.bound, 1.0)
    if apart and question.encoder_device is not None:
        shapes = _unequal(question, found, of_bound, rate)
    else:
        fewest = fewest_devices(found, of_bound, rate, apart=apart)
        tried = range(fewest, max(fewest + 1, min(fewest + _TRIES, MOST_SIMULATED + 1)))
        shapes = (shape_of(found, devices, apart=apart) for devices in tried)
    for bought in shapes:
        small = len(bought.workers) <= MOST_SIMULATED
        confirmed = small and trials.window(bought, question.workload, rate).verdict.sustained
        if confirmed or not small:
            break
    dollars = cost_per_million(1, question.hourly(bought), rate)
    return Purchase(bought, len(bought.workers), rate, confirmed, dollars)


def _unequal(question: Question, found: Estimate, of_bound: float, rate: float) -> Iterator[ClusterShape]:
    """Each pool as large as `rate` asks of it, and larger where that does not hold."""
    for attempt in range(_TRIES):
        asked = rate * ALIKE**attempt / of_bound
        counts = [math.ceil(asked / one) for one in (found.encoder, found.pd_worker)]
        if sum(counts) > MOST_BOUGHT:
            raise ConfigError(f"--rate {rate:g} takes more than {MOST_BOUGHT} devices: split it")
        yield question.apart(*counts)


def purchases(trials: Trials, ratios: Ratios, rate: float) -> tuple[Purchase, ...]:
    """Apart and as replicas; what serves nothing on the question's devices is left out."""
    pairs = ((ratios.best, True), (ratios.replicas, False))
    return tuple(purchase(trials, served, rate, apart=apart) for served, apart in pairs if served.rate)
