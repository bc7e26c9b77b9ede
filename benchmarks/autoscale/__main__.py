"""The scaling policy in virtual time, beside a static pool, HPA, a queue's length and Knative.

    python -m benchmarks autoscale [--results DIR] [--jobs 2] [--seed 0] [--write]

Four traces, cold starts of 5 and 60 s, one setting of each policy for all of them. On Azure's both pools are
scaled, on the others one at a time. `--results` keeps every trial: a run that is cut off goes on from there.
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
from matplotlib.ticker import MaxNLocator

from benchmarks.autoscale.comparison import (
    BOTH_POOLS,
    COLD_STARTS,
    LIMITS,
    OURS,
    PD_ONLY,
    PD_POLICIES,
    PD_WORKERS,
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
from benchmarks.result_page import RESULTS, fill, page_parser, publish
from triptych.base.progress import each
from triptych_bench.goodput.report.plots import COLOURS
from triptych_bench.simulator.run import NOT_MODELLED

_DEMAND = "#999999"


def draw(trace: Trace, result: Sequence[TrialFigures]) -> Figure:
    """One row for each policy, static ones apart; all trials of one cold start. On the right, PD workers."""
    static = next(one for one in result if one.policy == STATIC)
    scaled = [one for one in result if one.policy != STATIC]
    both = trace.name in BOTH_POOLS
    figure: Figure = plt.figure(figsize=(14 if both else 10, 1.9 * len(scaled) + 0.8), layout="constrained")
    axes = figure.subplots(len(scaled), 1 + both, sharex=True, sharey="col", squeeze=False)
    for index, (row, one) in enumerate(zip(axes, scaled, strict=True)):
        _demand(row[0], trace)
        seconds, good = one.worker_seconds / static.worker_seconds, one.good / static.good
        title = f"{one.policy}: {seconds:.0%} of static peak's encoder-seconds, {good:.1%} of its goodput"
        _workers(row[0], one.timeline, one.seconds, COLOURS[index])
        _dress(row[0], "encoders", PEAK_WORKERS, title)
        if both:
            title = f"{one.pd_seconds / static.pd_seconds:.0%} of its PD-worker-seconds"
            _workers(row[1], one.pd_timeline, one.seconds, COLOURS[index])
            _dress(row[1], "PD workers", PD_WORKERS, title)
            row[1].set_ylim(bottom=0)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=3)
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    figure.suptitle(f"{trace.name}, cold start {scaled[0].cold_start:g} s", fontsize=11)
    return figure


def _dress(axis: Axes, pool: str, maximum: int, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=9)
    axis.set_ylabel(pool)
    axis.axhline(maximum, color="#555555", linestyle=":", linewidth=1)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)


def _demand(axis: Axes, trace: Trace) -> None:
    """Workers that arriving work keeps busy."""
    step = trace.seconds / 1200
    moments = [index * step for index in range(1200)]
    busy = [trace.share(moment) * PEAK_WORKERS * UTILIZATION for moment in moments]
    axis.fill_between(moments, busy, color=_DEMAND, alpha=0.35, linewidth=0, label="busy with arriving work")


def _workers(axis: Axes, timeline: Sequence[tuple[float, ...]], seconds: float, colour: str) -> None:
    moments = [now for now, *_ in timeline] + [seconds]
    for place, style, label in ((3, "-", "paid for"), (2, "--", "ready")):
        counts = [change[place] for change in timeline]
        axis.step(
            moments,
            [*counts, counts[-1]],
            where="post",
            color=colour,
            linestyle=style,
            linewidth=1.2,
            label=label,
        )


def save(trace: Trace, result: Sequence[TrialFigures], path: Path) -> None:
    """PNG or SVG, by the path's suffix."""
    figure = draw(trace, result)
    figure.savefig(path, dpi=110)
    plt.close(figure)


RESULT = RESULTS / "autoscale.md"
#: What the policy must keep to at the first cold start: shares of the static pool's.
MAX_SECONDS, MIN_GOODPUT = 0.6, 0.99


def row(one: TrialFigures, static: TrialFigures) -> str:
    cold_start = "any" if one.policy == STATIC else f"{one.cold_start:g} s"
    pd = f"| {one.pd_seconds:.0f} | {one.pd_seconds / static.pd_seconds:.1%} " if static.pd_seconds else ""
    return (
        f"| {one.trace} | {cold_start} | {one.policy} | {one.worker_seconds:.0f} "
        f"| {one.worker_seconds / static.worker_seconds:.1%} {pd}| {one.good / static.good:.2%} "
        f"| {one.strict / one.requests:.1%} | {one.ttft:.1f} | {one.direction_changes} | {one.failures} |"
    )


def pd_row(one: TrialFigures, pd_only: Sequence[TrialFigures]) -> str:
    static = next(each for each in pd_only if each.trace == one.trace and each.policy == PD_ONLY + STATIC)
    policy = one.policy.removeprefix(PD_ONLY)
    cold_start = "any" if policy == STATIC else f"{one.cold_start:g} s"
    return (
        f"| {one.trace} | {cold_start} | {policy} | {one.pd_seconds:.0f} "
        f"| {one.pd_seconds / static.pd_seconds:.1%} | {one.good / static.good:.2%} "
        f"| {one.strict / one.requests:.1%} | {one.ttft:.1f} | {one.failures} |"
    )


def verdict(result: Sequence[TrialFigures]) -> str:
    """Whether ours keeps to the bar, trace by trace."""
    words = []
    for one in result:
        if one.policy == OURS and one.cold_start == COLD_STARTS[0]:
            static = static_of(result, one.trace)
            seconds, good = one.worker_seconds / static.worker_seconds, one.good / static.good
            kept_to = seconds <= MAX_SECONDS and good >= MIN_GOODPUT
            words.append(f"{one.trace} {seconds:.0%} and {good:.2%}: {'kept' if kept_to else '**missed**'}")
    return "; ".join(words)


def static_of(result: Sequence[TrialFigures], trace: str) -> TrialFigures:
    return next(one for one in result if one.trace == trace and one.policy == STATIC)


def report(result: Sequence[TrialFigures], options: argparse.Namespace) -> str:
    sizes = "; ".join(
        f"{trace.name} {trace.seconds:.0f} s, {static_of(result, trace.name).requests} requests, "
        f"peak to mean {trace.peak_to_mean:.1f}"
        for trace in (make() for make in TRACES.values())
    )
    order = list(TRACES), list(dict.fromkeys((*PD_POLICIES, *POLICIES)))
    pd_only = [one for one in result if one.policy.startswith(PD_ONLY)]
    result = [one for one in result if one not in pd_only]
    ranked = sorted(
        result, key=lambda one: (order[0].index(one.trace), one.cold_start, order[1].index(one.policy))
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
        seconds=MAX_SECONDS,
        goodput=MIN_GOODPUT,
        verdict=verdict(result),
        pd_peak=PD_WORKERS,
        max_num_seqs=LIMITS.pd.max_num_seqs,
        rows="\n".join(row(one, static_of(result, one.trace)) for one in ranked if not one.pd_seconds),
        both="\n".join(row(one, static_of(result, one.trace)) for one in ranked if one.pd_seconds),
        pd_rows="\n".join(pd_row(one, pd_only) for one in pd_only),
        pictures="\n".join(f"![{name}](autoscale-{name}.png)" for name in TRACES),
    )


def main() -> None:
    parser = page_parser(__doc__, RESULT, jobs=1, seed=0)
    parser.add_argument("--results", type=Path, help="folder that keeps the figures of every trial")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.results or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(options.jobs) as pool:
            asked = list(trials())
            results = pool.map(partial(kept, folder, seed=options.seed), asked)
            result = [next(results) for _ in each("trials", asked)]
    publish(report(result, options), RESULT, write=options.write)
    if options.write:
        for name, trace in TRACES.items():
            of_trace = [one for one in result if one.trace == name and one.cold_start == COLD_STARTS[0]]
            shown = [one for one in of_trace if not one.policy.startswith(PD_ONLY)]
            save(trace(), shown, RESULTS / f"autoscale-{name}.png")
