"""The scaling policy in virtual time, beside a static pool, HPA, a queue's length and Knative.

    python -m benchmarks autoscale [--results DIR] [--jobs 2] [--seed 0] [--write]

Three traces, cold starts of 5 and 60 s, one setting of each policy for all of them. `--results` keeps every
trial: a run that is cut off goes on from there.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.autoscale.comparison import (
    COLD_STARTS,
    OURS,
    POLICIES,
    SLO,
    STATIC,
    STRICT_SLO,
    TrialFigures,
    kept,
    trials,
)
from benchmarks.autoscale.policies import ENCODER_SLO
from benchmarks.autoscale.traces import PEAK_WORKERS, TRACES, UTILIZATION, Trace
from benchmarks.result_page import RESULTS, add_write_flag, fill, publish
from triptych.base.progress.progress import each
from triptych.goodput.report.plots import COLOURS
from triptych.simulator.run import NOT_MODELLED

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


RESULT = RESULTS / "autoscale.md"
#: What the policy must keep to at the first cold start: shares of the static pool's.
MOST_SECONDS, LEAST_GOODPUT = 0.6, 0.99


def row(one: TrialFigures, static: TrialFigures) -> str:
    cold_start = "any" if one.policy == STATIC else f"{one.cold_start:g} s"
    return (
        f"| {one.trace} | {cold_start} | {one.policy} | {one.worker_seconds:.0f} "
        f"| {one.worker_seconds / static.worker_seconds:.1%} | {one.good / static.good:.2%} "
        f"| {one.strict / one.requests:.1%} | {one.ttft:.1f} | {one.direction_changes} | {one.failures} |"
    )


def verdict(found: Sequence[TrialFigures]) -> str:
    """Whether ours keeps to the bar, trace by trace."""
    words = []
    for one in found:
        if one.policy == OURS and one.cold_start == COLD_STARTS[0]:
            static = static_of(found, one.trace)
            seconds, good = one.worker_seconds / static.worker_seconds, one.good / static.good
            kept_to = seconds <= MOST_SECONDS and good >= LEAST_GOODPUT
            words.append(f"{one.trace} {seconds:.0%} and {good:.2%}: {'kept' if kept_to else '**missed**'}")
    return "; ".join(words)


def static_of(found: Sequence[TrialFigures], trace: str) -> TrialFigures:
    return next(one for one in found if one.trace == trace and one.policy == STATIC)


def report(found: Sequence[TrialFigures], options: argparse.Namespace) -> str:
    sizes = "; ".join(
        f"{trace.name} {trace.seconds:.0f} s, {static_of(found, trace.name).requests} requests, "
        f"peak to mean {trace.peak_to_mean:.1f}"
        for trace in (make() for make in TRACES.values())
    )
    order = list(TRACES), list(POLICIES)
    ranked = sorted(
        found, key=lambda one: (order[0].index(one.trace), one.cold_start, order[1].index(one.policy))
    )
    return fill(
        "autoscale",
        jobs=options.jobs,
        seed=options.seed,
        sizes=sizes,
        not_modelled=NOT_MODELLED,
        peak=PEAK_WORKERS,
        slo=SLO,
        encoder_slo=ENCODER_SLO,
        strict=STRICT_SLO,
        cold_start=COLD_STARTS[0],
        seconds=MOST_SECONDS,
        goodput=LEAST_GOODPUT,
        verdict=verdict(found),
        rows="\n".join(row(one, static_of(found, one.trace)) for one in ranked),
        pictures="\n".join(f"![{name}](autoscale-{name}.png)" for name in TRACES),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, help="folder that keeps the figures of every trial")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=0)
    add_write_flag(parser, RESULT)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.results or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(options.jobs) as pool:
            asked = list(trials())
            results = pool.map(partial(kept, folder, seed=options.seed), asked)
            found = [next(results) for _ in each("trials", asked)]
    publish(report(found, options), RESULT, write=options.write)
    if options.write:
        for name, trace in TRACES.items():
            shown = [one for one in found if one.trace == name and one.cold_start == COLD_STARTS[0]]
            save(trace(), shown, RESULTS / f"autoscale-{name}.png")


if __name__ == "__main__":
    main()
