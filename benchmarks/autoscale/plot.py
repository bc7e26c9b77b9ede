"""A trace as a picture: the demand, and the workers that every policy had for it over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.autoscale.comparison import STATIC, TrialFigures
from benchmarks.autoscale.traces import PEAK_WORKERS, UTILIZATION, Trace
from triptych.goodput.report.plots import COLOURS

_DEMAND = "#999999"


def draw(trace: Trace, found: Sequence[TrialFigures]) -> Figure:
    """One row for each policy, static ones apart; all trials of one cold start."""
    static = next(one for one in found if one.policy == STATIC)
    scaled = [one for one in found if one.policy != STATIC]
    figure: Figure = plt.figure(figsize=(10, 1.9 * len(scaled) + 0.8), layout="constrained")
    axes = figure.subplots(len(scaled), 1, sharex=True, sharey=True)
    for index, (axis, one) in enumerate(zip(axes, scaled, strict=True)):
        _demand(axis, trace)
        _workers(axis, one, COLOURS[index])
        seconds, good = one.worker_seconds / static.worker_seconds, one.good / static.good
        axis.set_title(
            f"{one.policy}: {seconds:.0%} of static peak's encoder-seconds, {good:.1%} of its goodput",
            loc="left",
            fontsize=9,
        )
        axis.axhline(PEAK_WORKERS, color="#555555", linestyle=":", linewidth=1)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylabel("workers")
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    axes[-1].set_xlabel("seconds")
    figure.suptitle(f"{trace.name}, cold start {scaled[0].cold_start:g} s", fontsize=11)
    return figure


def _demand(axis: Axes, trace: Trace) -> None:
    """Workers that arriving work keeps busy."""
    step = trace.seconds / 1200
    moments = [index * step for index in range(1200)]
    busy = [trace.share(moment) * PEAK_WORKERS * UTILIZATION for moment in moments]
    axis.fill_between(moments, busy, color=_DEMAND, alpha=0.35, linewidth=0, label="busy with arriving work")


def _workers(axis: Axes, one: TrialFigures, colour: str) -> None:
    moments = [now for now, *_ in one.timeline] + [one.seconds]
    for place, style, label in ((3, "-", "paid for"), (2, "--", "ready")):
        counts = [change[place] for change in one.timeline]
        axis.step(
            moments,
            [*counts, counts[-1]],
            where="post",
            color=colour,
            linestyle=style,
            linewidth=1.2,
            label=label,
        )


def save(trace: Trace, found: Sequence[TrialFigures], path: Path) -> None:
    """PNG or SVG, by the path's suffix."""
    figure = draw(trace, found)
    figure.savefig(path, dpi=110)
    plt.close(figure)
