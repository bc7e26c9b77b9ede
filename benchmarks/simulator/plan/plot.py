"""The answer as a picture: shapes, sensitivity, and the scaling curve with its limits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from triptych.goodput.report.plots import COLOURS
from triptych.simulator.plan.answer import CapacityPlan, Scaling
from triptych.simulator.plan.scaling import SHARE
from triptych.simulator.plan.sensitivity import SensitivityPoint
from triptych.simulator.plan.tables import PARTS

APART, REPLICAS = COLOURS[0], COLOURS[1]
#: Ratios that are drawn: with more, the best ones.
_MOST_BARS = 9


def draw(found: CapacityPlan) -> Figure:
    """One row for the answer, one more for scaling where it was asked for."""
    kinds = sorted({point.kind for point in found.points}, reverse=True)
    columns, rows = max(1 + len(kinds), 2), 1 + (found.scaling is not None)
    figure: Figure = plt.figure(figsize=(4.4 * columns, 3.9 * rows), layout="constrained")
    question = found.question
    figure.suptitle(
        f"{question.workload_name} on {question.devices_named}, {question.slo}\n{found.ratios.verdict}"
    )
    grid = figure.add_gridspec(rows, 2 * columns)
    spans = [slice(2 * index, 2 * index + 2) for index in range(columns)]
    _shapes(figure.add_subplot(grid[0, : 2 * (columns - len(kinds))]), found)
    for kind, span in zip(kinds, spans[columns - len(kinds) :], strict=True):
        points = [point for point in found.points if point.kind == kind]
        _sensitivity(figure.add_subplot(grid[0, span]), kind, points, found)
    if found.scaling is not None:
        _rates(figure.add_subplot(grid[1, :columns]), found.scaling)
        _shares(figure.add_subplot(grid[1, columns:]), found.scaling)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.3)
    return figure


def _shapes(axis: Axes, found: CapacityPlan) -> None:
    drawn = sorted(found.ratios.apart, key=lambda served: served.bound, reverse=True)[:_MOST_BARS]
    bars = [served for served in found.ratios.all if served in drawn or served not in found.ratios.apart]
    for place, served in enumerate(bars):
        colour = APART if served in drawn else REPLICAS
        axis.bar(place, served.bound, 0.8, color=colour, alpha=0.2)
        axis.bar(place, served.rate, 0.5, color=colour)
        if len(served.rates) > 1:
            axis.vlines(place, min(served.rates), max(served.rates), color="black")
        label = f"{served.rate:.3g}" if not served.skipped else "ruled\nout"
        axis.annotate(
            label, (place, max(served.bound, *served.rates, 0.0)), ha="center", va="bottom", fontsize=8
        )
    axis.set_xticks(range(len(bars)), [served.name.replace(" ", "\n") for served in bars], fontsize=8)
    axis.set(title="sustained (dark), bound by costs (pale)", ylabel="requests/s")
    axis.margins(y=0.15)


def _sensitivity(axis: Axes, kind: str, points: Sequence[SensitivityPoint], found: CapacityPlan) -> None:
    values = [100 * point.value for point in points]
    named = (
        (found.ratios.best.name, APART, [point.apart for point in points]),
        (found.ratios.replicas.name, REPLICAS, [point.replicas for point in points]),
    )
    for name, colour, rates in named:
        axis.plot(values, rates, marker="o", color=colour, label=name)
    for point in points:
        if point.given:
            axis.axvline(100 * point.value, color="#555555", linestyle=":", label="as asked")
    label = "requests with pictures, %" if kind == "share" else "pictures shown before, %"
    axis.set(xlabel=label, ylabel="requests/s", title="when the load differs")
    axis.set_ylim(0, 1.08 * max(max(rates) for _, _, rates in named) or None)
    axis.legend(fontsize=8)


def _rates(axis: Axes, found: Scaling) -> None:
    workers = [point.workers for point in found.curve]
    axis.plot(workers, [point.rate for point in found.curve], marker="o", color=APART, label="workers")
    for index, one in enumerate(found.bottlenecks):
        if one.workers is not None:
            label = f"{PARTS[one.part]}: full at {one.workers}"
            axis.axhline(one.rate, color=COLOURS[1 + index], linestyle="--", label=label)
    _plain(axis)
    axis.set(xlabel="workers", ylabel="requests/s", title="scaling")
    axis.legend(fontsize=8)


def _shares(axis: Axes, found: Scaling) -> None:
    workers = [point.workers for point in found.curve]
    for colour, one in zip(COLOURS[1:], found.bottlenecks, strict=False):
        shares = [
            100 * (point.one_proxy if one.part == "proxy" else point.shares[one.part])
            for point in found.curve
        ]
        if max(shares) > 0:
            axis.plot(workers, shares, marker=".", color=colour, label=PARTS[one.part])
    axis.axhline(100 * SHARE, color="#555555", linestyle="--", label=f"full: {SHARE:.0%}")
    _plain(axis)
    axis.set(xlabel="workers", ylabel="share in use, %", title="what fills up")
    axis.legend(fontsize=8)


def _plain(axis: Axes) -> None:
    """Both axes by powers of ten, written out."""
    axis.set(xscale="log", yscale="log")
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def save(found: CapacityPlan, path: Path) -> None:
    """PNG or SVG, by the path's suffix."""
    figure = draw(found)
    figure.savefig(path, dpi=130)
    plt.close(figure)
