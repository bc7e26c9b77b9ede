"""When requests are sent: open-loop arrival times, in seconds from the window's start. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.base.errors import ConfigError

KINDS = ("poisson", "gamma", "constant", "ramp")


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`rate` in requests per second; `burstiness` of gamma: below 1 burstier than Poisson, above 1 calmer.

    A ramp goes from `rate` to `ramp_to` evenly over the window.
    """

    kind: str = "poisson"
    rate: float = 1.0
    burstiness: float = 1.0
    ramp_to: float = 0.0


def check_arrivals(arrivals: Arrivals) -> None:
    """ConfigError naming the flag of a value that cannot be."""
    if arrivals.kind not in KINDS:
        raise ConfigError(f"--arrivals {arrivals.kind!r} is not known: use one of {', '.join(KINDS)}")
    if not 0 < arrivals.rate < math.inf:
        raise ConfigError(f"--rate {arrivals.rate:g} must be above 0")
    if not 0 < arrivals.burstiness < math.inf:
        raise ConfigError(f"--burstiness {arrivals.burstiness:g} must be above 0")
    if arrivals.kind == "ramp" and not 0 < arrivals.ramp_to < math.inf:
        raise ConfigError("--arrivals ramp needs --ramp-to with a rate above 0")


def mean_rate(arrivals: Arrivals) -> float:
    return (arrivals.rate + arrivals.ramp_to) / 2 if arrivals.kind == "ramp" else arrivals.rate


def arrival_times(arrivals: Arrivals, count: int, seed: int) -> list[float]:
    """`count` ascending times. Random gaps are scaled so that the last is exactly at count / rate.

    Short windows would else offer another rate than they say; `vllm bench serve` does the same.
    """
    rng = random.Random(f"arrivals-{seed}")
    if arrivals.kind == "ramp":
        return _ramp(arrivals, count, rng)
    draw: Callable[[], float]
    if arrivals.kind == "constant":
        draw = _always_one
    else:
        shape = arrivals.burstiness if arrivals.kind == "gamma" else 1.0

        def draw() -> float:
            return rng.gammavariate(shape, 1.0)

    return _scaled([draw() for _ in range(count)], count / arrivals.rate)


def _always_one() -> float:
    return 1.0


def _scaled(gaps: Sequence[float], end: float) -> list[float]:
    total, at, times = sum(gaps), 0.0, []
    for gap in gaps:
        at += gap
        times.append(at / total * end)
    return times


def _ramp(arrivals: Arrivals, count: int, rng: random.Random) -> list[float]:
    """Poisson at unit rate, taken back through the rate's integral a·t + (b−a)·t²/2T."""
    span = count / mean_rate(arrivals)
    curve = (arrivals.ramp_to - arrivals.rate) / span
    unit = _scaled([rng.expovariate(1.0) for _ in range(count)], count)
    return [_inverse(arrivals.rate, curve, seen) for seen in unit]


def _inverse(rate: float, curve: float, seen: float) -> float:
    """t with rate·t + curve·t²/2 = seen, in the form that stays exact when the curve is flat."""
    return 2 * seen / (rate + math.sqrt(max(rate * rate + 2 * curve * seen, 0.0)))
