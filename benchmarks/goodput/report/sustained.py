"""Whether one window's rate was sustained: P99 of every metric of the SLO inside it, and no growing queue."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.goodput.load.record import RequestRecord
from triptych.goodput.report.drift import Drift, drift_of
from triptych.goodput.report.figures import summarise
from triptych.goodput.search import Verdict
from triptych.goodput.slo import Slo


def judge(records: Sequence[RequestRecord], slo: Slo, drift: Drift | None = None) -> Verdict:
    """The reference is the median end-to-end latency of completed requests.

    `drift` of the window where somebody has looked at it; else all records are looked at.
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
