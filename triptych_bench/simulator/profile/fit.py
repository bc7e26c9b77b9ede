"""Samples of measured times, and linear costs out of them, judged on samples that the fit has not seen."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from triptych.base.errors import ConfigError
from triptych.base.progress import Progress

#: Of so many samples one is left out of the fit: its error is the fit's.
HELD_OUT = 4
#: The terms of every stage, by the names of its costs.
TERMS: dict[str, tuple[str, ...]] = {
    "proxy": ("request", "item", "media_byte", "token"),
    "save": ("save_item", "save_byte"),
    "load": ("load_item", "load_byte"),
    "intake": ("take_request", "take_token"),
    "prepare": ("prepare_item", "prepare_pixel"),
    "tower": ("tower_batch", "tower_item", "tower_patch", "tower_pair"),
    "step": ("step", "prefill_token", "decode_seq", "context_token", "prefill_context"),
}

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one measurement did, by term, and how long it took: the median of `repeats`, in seconds."""

    terms: dict[str, float]
    seconds: float
    repeats: tuple[float, ...] = ()


def sample_of(terms: dict[str, float], repeats: Sequence[float]) -> Sample:
    """Their median."""
    return Sample(terms, statistics.median(repeats), tuple(repeats))


@dataclass(frozen=True, slots=True)
class Fit:
    """`costs`: seconds per unit of every term, none negative. Errors are |fitted / measured - 1| over the
    `held_out` samples that the fit has not seen; over all where there were too few to leave any out.
    """

    costs: dict[str, float]
    median_error: float
    p90_error: float
    samples: int
    held_out: int

    def seconds(self, terms: Mapping[str, float]) -> float:
        """What the fit says of such a piece of work."""
        return sum(cost * terms.get(name, 0.0) for name, cost in self.costs.items())


def fit_costs(samples: Sequence[Sample], names: Sequence[str]) -> Fit:
    """The costs of the terms `names`, fitted to relative errors: 10 % of a short step weigh as much as of a
    long one. ConfigError for no sample, or one that took no time.
    """
    if not samples or min(sample.seconds for sample in samples) <= 0:
        raise ConfigError("a fit needs samples that took time: measure again")
    ordered = sorted(samples, key=lambda sample: sample.seconds)
    held = ordered[HELD_OUT // 2 :: HELD_OUT]
    seen = [sample for index, sample in enumerate(ordered) if index % HELD_OUT != HELD_OUT // 2]
    if len(seen) < len(names) + 1:
        seen, held = ordered, []
    costs = _solve(seen, names)
    fit = Fit(costs, 0.0, 0.0, len(samples), len(held))
    errors = [abs(fit.seconds(sample.terms) / sample.seconds - 1) for sample in held or ordered]
    median, p90 = (float(value) for value in np.percentile(errors, (50, 90)))
    return Fit(costs, median, p90, len(samples), len(held))


def _solve(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, float]:
    rows = np.array([[sample.terms.get(name, 0.0) for name in names] for sample in samples], np.float64)
    rows /= np.array([sample.seconds for sample in samples])[:, None]
    # Terms differ by many orders of magnitude: columns of one length keep the solution's digits.
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    result = nnls(rows / scale, np.ones(len(samples))) / scale
    return {name: float(value) for name, value in zip(names, result, strict=True)}


def nnls(matrix: Floats, target: Floats) -> Floats:
    """x >= 0 with the least |matrix x - target|: the best plain solution over all choices of columns."""
    columns = range(matrix.shape[1])
    best, error = np.zeros(len(columns)), float(np.linalg.norm(target))
    for size in columns:
        for chosen in map(list, combinations(columns, size + 1)):
            x = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            off = float(np.linalg.norm(matrix[:, chosen] @ x - target))
            if off < error and (x >= 0).all():
                best, error = np.zeros(len(columns)), off
                best[chosen] = x
    return best


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Effort:
    """Repeats of every measurement, and the seconds that one, and one stage, may take at most."""

    repeats: int
    sample_seconds: float
    stage_seconds: float


FULL = Effort(repeats=7, sample_seconds=3.0, stage_seconds=20.0)
QUICK = Effort(repeats=3, sample_seconds=0.4, stage_seconds=2.5)


def in_time(label: str, grid: Iterable[T], count: int, effort: Effort, minimum: int = 4) -> list[T]:
    """What the stage, shown as `label`, has time for of a grid that measures as it is read; so many at least.

    The grid has `count` samples at most.
    """
    began = time.perf_counter()
    result: list[T] = []
    with Progress(label, count, "samples") as running:
        for sample in grid:
            result.append(sample)
            seconds = time.perf_counter() - began
            running.advance(left=stage_left(seconds, len(result) / count, effort))
            if seconds > effort.stage_seconds and len(result) >= minimum:
                break
    return result


def stage_left(seconds: float, share: float, effort: Effort) -> float:
    """Seconds that a stage will still take, `share` of whose grid took `seconds`: the rest of it, or of its
    time.
    """
    return max(0.0, min(seconds * (1 - share) / share, effort.stage_seconds - seconds))


def timed(work: Callable[[], None], terms: dict[str, float], effort: Effort) -> Sample:
    """`work` once to warm up, then up to `effort.repeats` times, at least twice.

    `work` returns when the device is done.
    """
    work()
    repeats: list[float] = []
    began = time.perf_counter()
    while len(repeats) < effort.repeats:
        start = time.perf_counter()
        work()
        end = time.perf_counter()
        repeats.append(end - start)
        if len(repeats) > 1 and end - began > effort.sample_seconds:
            break
    return sample_of(terms, repeats)
