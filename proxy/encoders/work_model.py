"""Model of the seconds that an item costs a tower, or a prompt a PD worker, learnt from what they report."""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Seconds that any item is expected to take, whatever the fit says of small ones.
MIN_WORK = 1e-4
#: Kinds that costs are kept for; of more, those that reported longest ago are forgotten.
MAX_KINDS = 64


@dataclass(frozen=True, slots=True)
class CostLine:
    """Seconds by patches as a line: through an average item, with `slope` seconds for a patch more."""

    patches: float
    seconds: float
    slope: float

    def at(self, patches: float) -> float:
        return self.seconds + self.slope * (patches - self.patches)


#: While nothing is known: a second for any item.
_UNKNOWN = CostLine(0.0, 1.0, 0.0)


class _Fit:
    """Least squares of a kind's reports, of which old ones count less and less."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, patches: int, seconds: float) -> None:
        x, decay = float(patches), self._decay
        self._n = self._n * decay + 1.0
        self._x = self._x * decay + x
        self._y = self._y * decay + seconds
        self._xx = self._xx * decay + x * x
        self._xy = self._xy * decay + x * seconds

    def line(self) -> CostLine | None:
        """None while all items had one size: their slope is not known."""
        mean = self.mean()
        spread = self._xx / self._n - mean.patches * mean.patches
        if spread <= 1e-9 * max(mean.patches * mean.patches, 1.0):
            return None
        slope = (self._xy / self._n - mean.patches * mean.seconds) / spread
        return CostLine(mean.patches, mean.seconds, max(slope, 0.0))

    def mean(self) -> CostLine:
        """A flat line through the average item."""
        return CostLine(self._x / self._n, self._y / self._n, 0.0)


class WorkModel:
    """Seconds of an encoder job as a + b·patches, for each kind of worker from what its towers report.

    A kind that has not reported costs what the known ones cost on average. One whose items were all of one
    size has the slope of that average, scaled by how its items compare.
    """

    def __init__(self, decay: float = 0.98) -> None:
        self._decay = decay
        #: By kind, the one that reported last at the end.
        self._fits: dict[str, _Fit] = {}
        #: Lines as last asked for, until the next report.
        self._lines: dict[str, CostLine] = {}

    @property
    def kinds(self) -> list[str]:
        """Those that have reported."""
        return list(self._fits)

    def learn(self, patches: int, seconds: float, kind: str = "") -> None:
        """A worker of the kind had an item of this size in its tower for `seconds`; nonsense is ignored."""
        if not (math.isfinite(seconds) and seconds > 0.0 and patches >= 0):
            return
        fit = self._fits.pop(kind, None) or _Fit(self._decay)
        fit.learn(patches, seconds)
        self._fits[kind] = fit
        if len(self._fits) > MAX_KINDS:
            del self._fits[next(iter(self._fits))]
        self._lines.clear()

    def work(self, patches: int | None, kind: str = "") -> float:
        """Seconds expected of an item; of an average one when its patches are not known yet."""
        line = self.line(kind)
        return max(line.seconds if patches is None else line.at(patches), MIN_WORK)

    def total(self, unknown: float, known: float, patches: float, kind: str = "") -> float:
        """Seconds expected of `unknown` items without a plan and of `known` ones with `patches` together."""
        line = self.line(kind)
        planned = known * line.seconds + line.slope * (patches - known * line.patches)
        return unknown * max(line.seconds, MIN_WORK) + max(planned, known * MIN_WORK)

    def speed(self, kind: str, reference: str) -> float:
        """How much faster a worker of `kind` is than one of `reference`, on an average item."""
        ours, theirs = self.line(kind), self.line(reference)
        patches = theirs.patches
        return max(theirs.at(patches), MIN_WORK) / max(ours.at(patches), MIN_WORK)

    def line(self, kind: str) -> CostLine:
        """Seconds by patches of this kind, as far as they are known."""
        line = self._lines.get(kind)
        if line is None:
            line = self._lines[kind] = self._line(kind)
            if len(self._lines) > 2 * MAX_KINDS:
                self._lines = {kind: line}
        return line

    def _line(self, kind: str) -> CostLine:
        fit = self._fits.get(kind)
        own = fit.line() if fit is not None else None
        if own is not None:
            return own
        others = self._average(kind)
        if fit is None:
            return others or _UNKNOWN
        mean = fit.mean()
        if others is None:
            return mean
        ratio = mean.seconds / max(others.at(mean.patches), MIN_WORK)
        return CostLine(mean.patches, mean.seconds, others.slope * ratio)

    def _average(self, kind: str) -> CostLine | None:
        """The mean of the other kinds' lines; None where there is no other."""
        known = [fit.line() or fit.mean() for name, fit in self._fits.items() if name != kind]
        if not known:
            return None
        patches = sum(line.patches for line in known) / len(known)
        seconds = sum(line.at(patches) for line in known) / len(known)
        return CostLine(patches, seconds, sum(line.slope for line in known) / len(known))
