"""Two results side by side, and two targets measured in turns: ratios with their spread. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.base.types import JsonObject

#: What is compared, and whether more is better.
COMPARED = {
    "request_goodput": True,
    "slo_attainment": True,
    "request_throughput": True,
    "output_throughput": True,
    "median_ttft_ms": False,
    "p99_ttft_ms": False,
    "median_tpot_ms": False,
    "p99_tpot_ms": False,
    "median_e2el_ms": False,
    "p99_e2el_ms": False,
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A metric of B over A: the ratio of the medians, and the range of what single windows give.

    `more_is_better` says how to read it.
    """

    metric: str
    a: float
    b: float
    ratio: float
    low: float
    high: float
    windows: tuple[int, int]
    more_is_better: bool

    @property
    def certain(self) -> bool:
        """Whether the whole range is on one side of 1, with at least two windows each."""
        return min(self.windows) >= 2 and (self.low > 1 or self.high < 1)

    @property
    def reading(self) -> str:
        """ "better", "worse" or "open"."""
        if not self.certain:
            return "open"
        return "better" if (self.ratio > 1) == self.more_is_better else "worse"


def ratio(
    metric: str, a: Sequence[float], b: Sequence[float], *, paired: bool, more_is_better: bool | None = None
) -> Ratio:
    """`paired`: window i of both ran one after the other with the same requests; else all pairs count.

    `more_is_better` is needed for a metric that COMPARED does not know.
    """
    pairs = list(zip(a, b, strict=True)) if paired else [(one, other) for one in a for other in b]
    shares = [other / one for one, other in pairs if one > 0] or [math.nan]
    middle_a, middle_b = statistics.median(a), statistics.median(b)
    return Ratio(
        metric,
        middle_a,
        middle_b,
        middle_b / middle_a if middle_a > 0 else math.nan,
        min(shares),
        max(shares),
        (len(a), len(b)),
        COMPARED[metric] if more_is_better is None else more_is_better,
    )


def compare_windows(a: Sequence[JsonObject], b: Sequence[JsonObject], *, paired: bool = False) -> list[Ratio]:
    """Every metric that all of the windows have."""
    result = []
    for metric in COMPARED:
        first, second = ([window.get(metric) for window in windows] for windows in (a, b))
        if all(isinstance(value, int | float) for value in (*first, *second)):
            result.append(ratio(metric, first, second, paired=paired))  # type: ignore[arg-type]
    return result


def compare_results(a: JsonObject, b: JsonObject) -> dict[str, list[Ratio]]:
    """Ratios by the label of windows that both results have."""
    first, second = by_label(a), by_label(b)
    return {label: compare_windows(first[label], second[label]) for label in first if label in second}


def compare_searches(a: JsonObject, b: JsonObject) -> Ratio | None:
    """Definition (c) of B over A; the range is what the two brackets allow. None without two found rates."""
    first, second = (result["search"] for result in (a, b))
    if not first or not second or not first["max_request_goodput"] or not second["max_request_goodput"]:
        return None
    lows = [float(result["max_request_goodput"]) for result in (first, second)]
    # A search that never failed has no upper end.
    highs = [float(result["lowest_failing_rate"] or math.inf) for result in (first, second)]
    return Ratio(
        metric="max_request_goodput",
        a=lows[0],
        b=lows[1],
        ratio=lows[1] / lows[0],
        low=lows[1] / highs[0],
        high=highs[1] / lows[0],
        windows=(first["votes"][1], second["votes"][1]),
        more_is_better=True,
    )


def by_label(result: JsonObject) -> dict[str, list[JsonObject]]:
    labels: dict[str, list[JsonObject]] = {}
    for window in result["windows"]:
        labels.setdefault(str(window["label"]), []).append(window)
    return labels


def differences(a: JsonObject, b: JsonObject) -> list[str]:
    """What else differs between two results, so that their ratio is not read as one of servers."""
    result = []
    for name in ("workload", "slo"):
        if a[name] != b[name]:
            result.append(f"another {name}")
    for key in ("chip", "cores"):
        if a["machine"][key] != b["machine"][key]:
            result.append(f"another {key}: {a['machine'][key]} and {b['machine'][key]}")
    for side, one in (("A", a), ("B", b)):
        if one["machine"]["loaded"]:
            result.append(
                f"{side} was made on a loaded machine (load {one['machine']['load_before']:g} before)"
            )
    return result
