"""Statistics of a window's records, and whether its rate was sustained. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from triptych_bench.goodput.load.job import RequestRecord
from triptych_bench.goodput.measure.search import Verdict
from triptych_bench.goodput.measure.slo import METRICS, Slo

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], rank: float) -> float:
    """Linear between the two neighbours, as numpy does it; infinite values are allowed. NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * rank / 100
    below = math.floor(place)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    share = place - below
    if share == 0 or low == high:
        return low
    return low + (high - low) * share


@dataclass(frozen=True, slots=True)
class Spread:
    """A metric over requests, in seconds; NaN when there was none. `percentiles` are those of PERCENTILES."""

    mean: float
    std: float
    percentiles: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        ranks = tuple(percentile(values, rank) for rank in PERCENTILES)
        if not values:
            return cls(math.nan, math.nan, ranks)
        return cls(statistics.fmean(values), statistics.pstdev(values), ranks)

    @property
    def median(self) -> float:
        return self.percentiles[0]


@dataclass(frozen=True, slots=True)
class WindowFigures:
    """One window. Latencies are of completed requests, `tails` of all: there a failure is infinitely late."""

    sent: int
    completed: int
    good: int
    duration: float
    prompt_tokens: int
    output_tokens: int
    spreads: dict[str, Spread]
    tails: dict[str, float]
    attainments: dict[str, float]
    lateness: Spread

    @property
    def failed(self) -> int:
        return self.sent - self.completed

    @property
    def throughput(self) -> float:
        """Completed requests per second."""
        return self.completed / self.duration

    @property
    def goodput(self) -> float:
        """Definition (a): requests per second that met every SLO."""
        return self.good / self.duration

    @property
    def attainment(self) -> float:
        """Definition (b): good requests over those that were sent, failures included."""
        return self.good / self.sent


def summarise(records: Sequence[RequestRecord], slo: Slo, *, closed: bool = False) -> WindowFigures:
    """Figures of the records that are no warm-up; ValueError when there is none.

    `closed`: of a closed loop, whose warm-up is a wave of its own.
    """
    measured = [record for record in records if not record.warm_up]
    if not measured:
        raise ValueError("a window without measured requests")
    done = [record for record in measured if record.ok]
    missed = [slo.misses(record.latencies()) for record in measured]
    return WindowFigures(
        sent=len(measured),
        completed=len(done),
        good=sum(record.ok and not misses for record, misses in zip(measured, missed, strict=True)),
        duration=_duration(records, measured, closed),
        prompt_tokens=sum(record.prompt_tokens for record in done),
        output_tokens=sum(record.output_tokens for record in done),
        spreads={
            "ttft": Spread.of([record.ttft for record in done]),
            "tpot": Spread.of([record.tpot for record in done if record.output_tokens > 1]),
            "itl": Spread.of([gap for record in done for gap in record.itls]),
            "e2el": Spread.of([record.e2e for record in done]),
        },
        tails={name: percentile([record.latencies()[name] for record in measured], 99) for name in METRICS},
        attainments={
            name: sum(record.latencies()[name] <= slo.seconds(name) for record in done) / len(measured)
            for name, _ in slo.limits
        },
        lateness=Spread.of([record.late for record in measured]),
    )


def _duration(records: Sequence[RequestRecord], measured: Sequence[RequestRecord], closed: bool) -> float:
    """From the window's start, or its last warm-up request, to the last end of a measured one.

    From the first measured request on, n requests would fill only n − 1 gaps. In a closed loop they fill the
    time from there on, and all of the warm-up was sent at once: its own time is none of theirs.
    """
    if closed:
        begun = min(record.sent for record in measured)
    else:
        begun = max((record.sent for record in records if record.warm_up), default=0.0)
    ends = [record.sent + (record.e2e if math.isfinite(record.e2e) else 0.0) for record in measured]
    return max(max(ends) - begun, 1e-9)


#: More points would take a second of Python for their pairs.
MAX_POINTS = 400
#: Standard deviations of the Mann-Kendall test, and the growth that matters, as a share of the limit.
SURE = 3.0
MATTERS = 0.2


@dataclass(frozen=True, slots=True)
class Drift:
    """`growth`: seconds of TTFT that the window added (Theil-Sen); `z`: how sure that is (Mann-Kendall)."""

    growth: float
    z: float
    grows: bool


def drift_of(records: Sequence[RequestRecord], slo: Slo) -> Drift:
    """Of the completed requests in the order of their sending; without a TTFT limit, against the median."""
    done = sorted((r for r in records if r.ok and not r.warm_up), key=lambda r: r.sent)
    done = done[:: math.ceil(len(done) / MAX_POINTS) or 1]
    if len(done) < 8:
        return Drift(0.0, 0.0, False)
    points = [(record.sent, record.ttft) for record in done]
    pairs = [
        (later[0] - early[0], later[1] - early[1])
        for index, early in enumerate(points)
        for later in points[index + 1 :]
    ]
    slopes = [rise / run for run, rise in pairs if run > 0]
    if not slopes:
        return Drift(0.0, 0.0, False)
    growth = statistics.median(slopes) * (points[-1][0] - points[0][0])
    score = sum((rise > 0) - (rise < 0) for _, rise in pairs)
    count = len(points)
    z = score / math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    limit = slo.seconds("ttft")
    scale = limit if math.isfinite(limit) else statistics.median(ttft for _, ttft in points) / MATTERS
    return Drift(growth, z, z > SURE and growth > MATTERS * scale)


def judge(records: Sequence[RequestRecord], slo: Slo, drift: Drift | None = None) -> Verdict:
    """The reference is the median end-to-end latency of completed requests.

    `drift` of the window where it is known; else it is computed from all records.
    """
    figures = summarise(records, slo)
    reasons = [
        f"P99 {name} {figures.tails[name] * 1000:.0f} ms over {limit:g}"
        for name, limit in slo.limits
        if not figures.tails[name] * 1000 <= limit
    ]
    drift = drift or drift_of(records, slo)
    if drift.grows:
        reasons.append(f"TTFT grew by {drift.growth * 1000:.0f} ms within the window")
    return Verdict(not reasons, figures.spreads["e2el"].median, "; ".join(reasons))
