"""The report's pictures: tail latencies by system and load, goodput of searches."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.baselines.cell_results import CellResults
from benchmarks.baselines.tables import number
from triptych.goodput.measure.slo import parse_slo
from triptych.goodput.report.plots import COLOURS

#: Bars whose neighbour is so many times as high would be invisible on a linear axis.
_LINEAR_RANGE = 20.0


def save_charts(results: CellResults, folder: Path) -> list[Path]:
    """baselines-NAME-latency.png and so on, those that there is data for."""
    paths = []
    for name, draw in (("latency", latency), ("goodput", goodput), ("capacity", capacity)):
        figure = draw(results)
        if figure is not None:
            paths.append(folder / f"baselines-{results.matrix['name']}-{name}.png")
            figure.savefig(paths[-1], dpi=110)
            plt.close(figure)
    return paths


def latency(results: CellResults) -> Figure | None:
    """Tails of TTFT and TPOT at the fixed rate, with the objectives."""
    loads = results.measured_loads("fixed")
    if not loads:
        return None
    figure: Figure
    figure, axes = plt.subplots(2, 1, figsize=(max(7.0, 1.9 * len(loads)), 7.0), layout="constrained")
    share = results.matrix["fixed"]["share"]
    figure.suptitle(f"{results.matrix['name']}: at {share:.0%} of colocated's capacity{_mark(results)}")
    systems = _systems(results, "fixed", loads)
    for axis, metric in zip(axes, ("ttft", "tpot"), strict=True):
        _bars(axis, results, metric, loads, systems)
        for place, load in enumerate(loads):
            limit = dict(parse_slo([results.matrix["loads"][load]]).limits).get(metric)
            if limit is not None:
                label = "SLO" if not place else None
                axis.hlines(limit, place - 0.45, place + 0.45, color="#333333", linestyle="--", label=label)
        _dress(axis, results.metrics[metric].title, loads)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=8, ncols=6)
    return figure


def goodput(results: CellResults) -> Figure | None:
    """Highest sustained rates; whiskers are the range of repeats."""
    return _single(results, "goodput", "search", "Goodput by search (c)")


def capacity(results: CellResults) -> Figure | None:
    """Throughput of the closed loop, colocated's other settings included."""
    return _single(
        results, "capacity", "capacity", f"{results.matrix['capacity']['concurrency']} requests at once"
    )


def _single(results: CellResults, metric: str, kind: str, title: str) -> Figure | None:
    loads = results.measured_loads(kind)
    if not loads:
        return None
    systems = _systems(results, kind, loads)
    width = min(max(6.5, 0.3 * len(loads) * len(systems) + 2.0), 13.0)
    figure: Figure
    figure, axis = plt.subplots(figsize=(width, 4.0), layout="constrained")
    figure.suptitle(f"{results.matrix['name']}: {title}{_mark(results)}")
    _bars(axis, results, metric, loads, systems)
    _dress(axis, results.metrics[metric].title, loads)
    figure.legend(loc="outside lower center", fontsize=8, ncols=5)
    return figure


def _systems(results: CellResults, kind: str, loads: Sequence[str]) -> list[str]:
    return [name for name in results.systems if any(results.by_repeat(kind, load, name) for load in loads)]


def _bars(
    axis: Axes, results: CellResults, metric: str, loads: Sequence[str], systems: Sequence[str]
) -> None:
    """Medians side by side, whiskers for the range; only systems that a load has take room there."""
    every, width, heights, named = list(results.systems), 0.84 / len(systems), [], set()
    for place, load in enumerate(loads):
        found = {name: list(results.values(metric, load, name).values()) for name in systems}
        there = {name: values for name, values in found.items() if values}
        for index, (system, values) in enumerate(there.items()):
            at, middle = place + (index - (len(there) - 1) / 2) * width, statistics.median(values)
            axis.bar(
                at,
                middle,
                width * 0.92,
                color=COLOURS[every.index(system) % len(COLOURS)],
                hatch="//" if every.index(system) >= len(COLOURS) else None,
                label=None if system in named else system,
            )
            named.add(system)
            axis.vlines(at, min(values), max(values), color="black", linewidth=1)
            axis.annotate(
                number(middle),
                (at, max(values)),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=7,
                rotation=90,
            )
            heights.append(middle)
    positive = [height for height in heights if height > 0]
    if positive and max(positive) > _LINEAR_RANGE * min(positive):
        axis.set_yscale("log")
    axis.margins(y=0.2)


def _dress(axis: Axes, title: str, loads: Sequence[str]) -> None:
    axis.set_xticks(range(len(loads)), loads)
    axis.set_ylabel(title)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)


def _mark(results: CellResults) -> str:
    return " – LOADED MACHINE" if results.loaded() else ""
