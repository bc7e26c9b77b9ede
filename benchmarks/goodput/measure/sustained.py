"""Whether one window's rate was sustained: P99 of every metric of the SLO inside it, and no growing queue."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.goodput.load.record import RequestRecord
from triptych.goodput.measure.figures import summarise
from triptych.goodput.measure.search import Verdict
from triptych.goodput.measure.slo import Slo

#: More points would take a second of Python for their pairs.
MOST_POINTS = 400
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
    done = done[:: math.ceil(len(done) / MOST_POINTS) or 1]
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
