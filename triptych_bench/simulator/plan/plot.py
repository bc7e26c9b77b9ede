"""The answer as a picture: shapes, sensitivity, and the scaling curve with its limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from triptych_bench.goodput.report.plots import COLOURS, sheet
from triptych_bench.simulator.plan.answer import CapacityPlan, SensitivityPoint
from triptych_bench.simulator.plan.scaling import Scaling
from triptych_bench.simulator.plan.tables import PARTS

APART, REPLICAS = COLOURS[0], COLOURS[1]
#: Ratios that are drawn: with more, the best ones.
_MAX_BARS = 9


def save(plan: CapacityPlan, path: Path) -> None:
    """The answer beside what was asked for, its sensitivity and scaling: PNG or SVG, by the path's suffix."""
    kinds = sorted({point.kind for point in plan.points}, reverse=True)
    question = plan.question
    title = f"{question.workload_name} on {question.devices_named}, {question.slo}\n{plan.ratios.verdict}"
    figure, (shapes, *others) = sheet(title, 1 + len(kinds) + (plan.scaling is not None))
    _shapes(shapes, plan)
    for axis, kind in zip(others, kinds, strict=False):
        _sensitivity(axis, kind, [point for point in plan.points if point.kind == kind], plan)
    if plan.scaling is not None:
        _rates(others[-1], plan.scaling)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _shapes(axis: Axes, plan: CapacityPlan) -> None:
    ratios = plan.ratios
    drawn = sorted(ratios.apart, key=lambda served: served.bound, reverse=True)[:_MAX_BARS]
    bars = [served for served in ratios.all if served in drawn or served not in ratios.apart]
    for place, served in enumerate(bars):
        colour = APART if served in drawn else REPLICAS
        axis.bar(place, served.bound, 0.8, color=colour, alpha=0.2)
        axis.bar(place, served.rate, 0.5, color=colour)
        if len(served.rates) > 1:
            axis.vlines(place, min(served.rates), max(served.rates), color="black")
        label = f"{served.rate:.3g}" if not served.skipped else "ruled\nout"
        top = max(served.bound, *served.rates, 0.0)
        axis.annotate(label, (place, top), ha="center", va="bottom", fontsize=8)
    axis.set_xticks(range(len(bars)), [served.name.replace(" ", "\n") for served in bars], fontsize=8)
    axis.set(title="sustained (dark), bound by costs (pale)", ylabel="requests/s")
    axis.margins(y=0.15)


def _sensitivity(axis: Axes, kind: str, points: Sequence[SensitivityPoint], plan: CapacityPlan) -> None:
    values = [100 * point.value for point in points]
    apart, replicas = [point.apart for point in points], [point.replicas for point in points]
    axis.plot(values, apart, marker="o", color=APART, label=plan.ratios.best.name)
    axis.plot(values, replicas, marker="o", color=REPLICAS, label=plan.ratios.replicas.name)
    for point in points:
        if point.given:
            axis.axvline(100 * point.value, color="#555555", linestyle=":", label="as asked")
    label = "requests with pictures, %" if kind == "share" else "pictures shown before, %"
    axis.set(xlabel=label, ylabel="requests/s", title="when the load differs")
    axis.set_ylim(0, 1.08 * max(*apart, *replicas) or None)
    axis.legend(fontsize=8)


def _rates(axis: Axes, scaled: Scaling) -> None:
    workers = [point.workers for point in scaled.curve]
    axis.plot(workers, [point.rate for point in scaled.curve], marker="o", color=APART, label="workers")
    for colour, one in zip(COLOURS[1:], scaled.bottlenecks, strict=False):
        if one.workers is not None:
            label = f"{PARTS[one.part]}: full at {one.workers}"
            axis.axhline(one.rate, color=colour, linestyle="--", label=label)
    axis.set(xscale="log", yscale="log", xlabel="workers", ylabel="requests/s", title="scaling")
    for scale in (axis.xaxis, axis.yaxis):
        # Powers of ten, written out.
        scale.set_major_formatter("{x:,.10g}")
    axis.legend(fontsize=8)
