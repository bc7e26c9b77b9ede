"""How many devices a rate takes, and what a million requests cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.errors import ConfigError
from triptych.simulator.cluster.shape import ClusterShape, colocated
from triptych.simulator.plan.estimate import Estimate, estimate
from triptych.simulator.plan.ratios import Ratios, Served
from triptych.simulator.plan.trials import Trials

#: Shapes up to so many devices are simulated before they are named; larger ones are named by their bound.
MOST_SIMULATED = 32
MOST_BOUGHT = 4096
#: Devices added to a shape that does not hold the rate, before it is named as it is.
_TRIES = 4


@dataclass(frozen=True, slots=True)
class Purchase:
    """`shape` serves `rate`; `confirmed` in simulation. `dollars_per_million` requests, if priced."""

    shape: ClusterShape
    devices: int
    rate: float
    confirmed: bool
    dollars_per_million: float | None


def cost_per_million(devices: int, hour: float | None, rate: float) -> float | None:
    """Dollars for a million requests at `rate` per second; None without a price or a rate."""
    if hour is None or rate <= 0:
        return None
    return devices * hour / 3600 / rate * 1e6


def fewest_workers(
    found: Estimate, of_bound: float, rate: float, *, apart: bool
) -> Iterator[tuple[int, int]]:
    """(encoders, PD workers), or (0, replicas): the fewest whose bound, less what waiting takes of it, is
    `rate` requests per second; then one more at a time.

    ConfigError when that is more than MOST_BOUGHT.
    """
    asked = rate / of_bound
    needed = (asked / found.encoder, asked / found.pd_worker) if apart else (0.0, asked / found.replica)
    if max(needed) > MOST_BOUGHT or sum(map(math.ceil, needed)) > MOST_BOUGHT:
        raise ConfigError(f"--rate {rate:g} takes more than {MOST_BOUGHT} devices: split it")
    encoders, others = map(math.ceil, needed)
    while True:
        yield encoders, others
        # The pool that limits both grows.
        if encoders * found.encoder < others * found.pd_worker and encoders:
            encoders += 1
        else:
            others += 1


def purchase(trials: Trials, served: Served, rate: float, *, apart: bool) -> Purchase:
    """The fewest devices by the bound, with what the worst of the answer's loads left of it; then simulated.

    ConfigError for a rate that cannot be served.
    """
    if not 0 < rate < math.inf:
        raise ConfigError(f"--rate {rate:g} must be above 0")
    question = trials.question
    of_bound = min(min(served.rates) / served.bound, 1.0)
    for tried, counts in enumerate(fewest_workers(estimate(question), of_bound, rate, apart=apart), 1):
        bought = question.apart(*counts) if apart else colocated(counts[1])
        devices = question.devices_in(bought)
        small = devices <= MOST_SIMULATED
        confirmed = small and trials.window(bought, question.workload, rate).sustained
        if confirmed or devices >= MOST_SIMULATED or tried == _TRIES:
            break
    dollars = cost_per_million(1, question.hourly(bought), rate)
    return Purchase(bought, devices, rate, confirmed, dollars)


def purchases(trials: Trials, ratios: Ratios, rate: float) -> tuple[Purchase, ...]:
    """Apart and as replicas; what serves nothing on the question's devices is left out."""
    pairs = ((ratios.best, True), (ratios.replicas, False))
    return tuple(purchase(trials, served, rate, apart=apart) for served, apart in pairs if served.rate)
