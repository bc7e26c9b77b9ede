"""How many devices a rate takes, and what a million requests cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from triptych.errors import ConfigError
from triptych.simulator.plan.estimate import estimate
from triptych.simulator.plan.ratios import Ratios, Served
from triptych.simulator.plan.trials import Trials
from triptych.simulator.shape import ClusterShape, colocated, on_devices

#: Shapes up to so many devices are simulated before they are named; larger ones are told by their bound.
MOST_SIMULATED = 32
MOST_DEVICES = 4096
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


def purchase(trials: Trials, served: Served, rate: float, *, apart: bool) -> Purchase:
    """The fewest devices that serve `rate`: by the bound, and what the answer has left of it; then simulated.

    ConfigError when it takes more than MOST_DEVICES.
    """
    if not 0 < rate < math.inf:
        raise ConfigError(f"--rate {rate:g} must be above 0")
    hour = trials.question.device.hour
    found = estimate(trials.question)
    for devices in range(2 if apart else 1, MOST_DEVICES + 1):
        shape = best_shape(trials, devices) if apart else colocated(devices)
        if found.of(shape) * served.of_bound >= rate:
            break
    else:
        raise ConfigError(f"--rate {rate:g} takes more than {MOST_DEVICES} devices: split it")
    confirmed = False
    for more in range(_TRIES):
        shape = best_shape(trials, devices + more) if apart else colocated(devices + more)
        if devices + more > MOST_SIMULATED:
            break
        if trials.window(shape, trials.question.workload, rate).verdict.sustained:
            devices, confirmed = devices + more, True
            break
    else:
        devices += _TRIES - 1
    return Purchase(shape, devices, rate, confirmed, cost_per_million(devices, hour, rate))


def best_shape(trials: Trials, devices: int) -> ClusterShape:
    """The ratio of so many devices with the highest bound; the more even one where two are alike."""
    found = estimate(trials.question)
    if math.isinf(found.encoder):
        return on_devices(0, devices)
    # Where encoders and PD workers are busy alike: one of the two whole numbers around it.
    even = devices * found.pd_worker / (found.pd_worker + found.encoder)
    counts = {min(max(1, round_), devices - 1) for round_ in (math.floor(even), math.ceil(even))}
    best = max(sorted(counts), key=lambda count: found.bound(count, devices - count))
    return on_devices(best, devices - best)


def purchases(trials: Trials, ratios: Ratios, rate: float) -> tuple[Purchase, ...]:
    """Apart and as replicas; what serves nothing on the question's devices is left out."""
    pairs = ((ratios.best, True), (ratios.replicas, False))
    return tuple(purchase(trials, served, rate, apart=apart) for served, apart in pairs if served.rate)
