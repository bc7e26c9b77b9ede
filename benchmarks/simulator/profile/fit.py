"""Linear costs out of measured times: non-negative least squares, judged on samples that it has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triptych.errors import ConfigError

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
_TOLERANCE = 1e-10

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one measurement did, by term, and how long it took: the median of `repeats`, in seconds."""

    terms: dict[str, float]
    seconds: float
    repeats: tuple[float, ...] = ()


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
    found = nnls(rows / scale, np.ones(len(samples))) / scale
    return {name: float(value) for name, value in zip(names, found, strict=True)}


def nnls(matrix: Floats, target: Floats) -> Floats:
    """x >= 0 with the least |matrix x - target|, by an active set (Lawson and Hanson)."""
    count = matrix.shape[1]
    x = np.zeros(count)
    free = np.zeros(count, dtype=bool)
    for _ in range(3 * count + 10):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[free] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= _TOLERANCE:
            break
        free[best] = True
        x = _descend(matrix, target, x, free)
    return x


def _descend(matrix: Floats, target: Floats, x: Floats, free: NDArray[np.bool_]) -> Floats:
    """The least squares over the free variables; those that would turn negative are bound to 0 again."""
    while free.any():
        wished = np.zeros_like(x)
        wished[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        negative = free & (wished <= 0)
        if not negative.any():
            return wished
        steps = x[negative] / np.maximum(x[negative] - wished[negative], 1e-300)
        x = x + float(steps.min()) * (wished - x)
        free &= x > _TOLERANCE * max(1.0, float(np.abs(x).max()))
        x[~free] = 0.0
    return np.zeros_like(x)
