"""The highest rate that a server sustains: definition (c) of goodput. Pure: a callback measures windows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

#: A reference figure that moved by more between start and end of a search makes the search doubtful.
DRIFT_LIMIT = 1.2
MAX_STEPS_DOWN = 6


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one window: whether its rate was sustained, and a latency by which the machine is watched."""

    sustained: bool
    reference: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Rates in requests per second. A rate is judged by the majority of `windows` windows (odd).

    `step` is the first factor away from `start`; further ones are its squares, up to 2.
    """

    start: float
    lowest: float = 0.05
    highest: float = 1000.0
    resolution: float = 0.05
    windows: int = 3
    confirmations: int = 2
    step: float = 2.0


@dataclass(slots=True)
class RateTrial:
    """All windows at one rate."""

    rate: float
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def passed(self) -> int:
        return sum(verdict.sustained for verdict in self.verdicts)

    @property
    def sustained(self) -> bool:
        return 2 * self.passed > len(self.verdicts)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`rate` 0: not even the lowest was sustained. `failing` infinite: even the highest was.

    `votes` are sustained and all windows at `rate`. `drift` is the reference latency of the first sustained
    rate, measured again at the end, over its first value.
    """

    rate: float
    failing: float
    votes: tuple[int, int]
    drift: float
    trials: tuple[RateTrial, ...]

    @property
    def drifted(self) -> bool:
        return not 1 / DRIFT_LIMIT <= self.drift <= DRIFT_LIMIT


class _Search:
    def __init__(self, measure: Callable[[float], Verdict], limits: SearchLimits) -> None:
        self._measure = measure
        self._limits = limits
        self.trials: dict[float, RateTrial] = {}
        self.reference: tuple[float, float] | None = None

    def window(self, rate: float) -> Verdict:
        verdict = self._measure(rate)
        self.trials.setdefault(rate, RateTrial(rate)).verdicts.append(verdict)
        return verdict

    def sustains(self, rate: float) -> bool:
        """Measures until a majority of `windows` is certain."""
        need = self._limits.windows // 2 + 1
        trial = self.trials.setdefault(rate, RateTrial(rate))
        while trial.passed < need and len(trial.verdicts) - trial.passed < need:
            verdict = self.window(rate)
            if self.reference is None and verdict.sustained:
                self.reference = (rate, verdict.reference)
        return trial.sustained

    def bracket(self) -> tuple[float, float]:
        """A sustained rate (0: none) and one that is not (infinite: none)."""
        limits, rate, step = self._limits, self._limits.start, self._limits.step
        if self.sustains(rate):
            while rate < limits.highest:
                low, rate, step = rate, min(rate * step, limits.highest), min(step * step, 2.0)
                if not self.sustains(rate):
                    return low, rate
            return rate, math.inf
        while rate > limits.lowest:
            high, rate, step = rate, max(rate / step, limits.lowest), min(step * step, 2.0)
            if self.sustains(rate):
                return rate, high
        return 0.0, rate

    def bisect(self, low: float, high: float) -> tuple[float, float]:
        while high / low > 1 + self._limits.resolution:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.sustains(middle) else (low, middle)
        return low, high

    def confirm(self, low: float, high: float) -> tuple[float, float]:
        """Further windows at the rate found; a rate that they vote down gives way to one a step below."""
        for _ in range(MAX_STEPS_DOWN):
            for _ in range(self._limits.confirmations):
                self.window(low)
            if self.trials[low].sustained:
                return low, high
            high, low = low, low / (1 + self._limits.resolution)
            while low > self._limits.lowest and not self.sustains(low):
                high, low = low, low / (1 + self._limits.resolution)
        return low, high


def search(measure: Callable[[float], Verdict], limits: SearchLimits) -> SearchResult:
    """Goes up or down from `start`, bisects, confirms, and looks again at the first sustained rate."""
    run = _Search(measure, limits)
    low, high = run.bracket()
    if low > 0 and math.isfinite(high):
        low, high = run.confirm(*run.bisect(low, high))
    drift = 1.0
    if run.reference is not None:
        rate, before = run.reference
        after = run.window(rate).reference
        drift = after / before if before > 0 else 1.0
    best = run.trials.get(low, RateTrial(low))
    votes = (best.passed, len(best.verdicts))
    trials = tuple(run.trials[rate] for rate in sorted(run.trials))
    return SearchResult(low, high, votes, drift, trials)
